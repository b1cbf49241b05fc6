"""State of Keras's callbacks and data after a resume, where a checkpoint cannot hold all of it."""

import keras
import numpy as np
import pytest

from tests.unit.checkpoint_model import (
    BATCH,
    STEPS,
    Act,
    arrays,
    build,
    fit,
    interrupt,
    job,  # noqa: F401
    require_equal,
)
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    Checkpoint,
)
from tfscale.checkpoints.resumable import read_counters
from tfscale.config import ConfigError, ExchangeError
from tfscale.data import GlobalBatches
from tfscale.data.global_batches import restore_data
from tfscale.fit.agreement import require_same_samples
from tfscale.internals import keras as internals


class _Scores(keras.callbacks.Callback):
    """Gives each epoch a score, and remembers the weights it had."""

    def __init__(self, *scores):
        super().__init__()
        self.scores, self.weights = scores, {}

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]
        self.weights[epoch] = self.model.get_weights()


def _best():
    return keras.callbacks.EarlyStopping("score", patience=9, mode="min", restore_best_weights=True)


def test_the_best_epoch_is_sought_anew_where_its_weights_are_lost(tmp_path, caplog):
    scores = _Scores(0.1, 0.5, 0.2, 0.3)
    fit(Checkpoint(tmp_path), Act(STEPS + 1, interrupt), epochs=4, more=[scores, _best()])
    model, _ = fit(Checkpoint(tmp_path), epochs=4, more=[scores, _best()])
    # Neither epoch 0, whose weights are gone, nor the first of this run.
    for own, wanted in zip(model.get_weights(), scores.weights[2], strict=True):
        np.testing.assert_array_equal(own, wanted)
    assert "EarlyStopping on rank 0 seeks the best epoch again" in caplog.text


def test_averages_that_stand_in_for_weights_when_a_backup_is_written(tmp_path):
    def train(backup, act=None):
        model = build()
        model.optimizer.use_ema = True
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        return fit(backup, act, model=model, more=[swap])[0]

    whole = train(None)
    train(BackupAndRestore(str(tmp_path)), Act(2 * STEPS + 1, interrupt))
    require_equal(train(BackupAndRestore(str(tmp_path))), whole)


def test_at_the_end_of_training_weights_and_averages_are_not_exchanged():
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    swap._ema_weights_in_model = True
    for is_end, expected in ((False, True), (True, False)):
        (state,) = read_counters([swap], is_end)
        assert bool(state["numbers"]["_ema_weights_in_model"]) == expected


@pytest.mark.parametrize(
    ("has_last_step", "steps_per_execution"), [(True, 1), (True, 3), (False, 1), (False, 3)]
)
def test_executions_are_counted_as_this_keras_does(monkeypatch, has_last_step, steps_per_execution):
    """The second execution of an epoch ends: Keras 3.10 names its first step, later its last."""
    monkeypatch.setattr(internals, "_HAS_LAST_STEP", has_last_step)
    model = build()
    model.compile(keras.optimizers.SGD(), "mse", steps_per_execution=steps_per_execution)
    last = 2 * steps_per_execution - 1 if has_last_step else steps_per_execution
    assert internals.steps_until(model, last) == 2 * steps_per_execution


def test_data_goes_on_where_nothing_is_left_to_train(tmp_path):
    fit(Checkpoint(tmp_path))
    data = GlobalBatches(*arrays(), batch_size=BATCH // 2, seed=2)
    _, steps = fit(Checkpoint(tmp_path), data=data)
    assert (steps, data.epoch, data.batch_size) == ([], 3, BATCH // 2)


@pytest.mark.parametrize(("first_step", "expected"), [(0, 6), (2, None), (None, 6)])
def test_batches_that_other_ranks_cannot_share(caplog, first_step, expected):
    data = GlobalBatches(np.zeros(24), np.zeros(24), batch_size=6)
    data._rank_and_size = (0, 3)
    state = {**data.state(), "batch_size": 8, "epoch": 5}
    if expected is None:
        with pytest.raises(ConfigError, match="keeps its batches of 8.* divides it"):
            restore_data(data, state, first_step)
        return
    restore_data(data, state, first_step)
    assert (data.batch_size, data.epoch) == (expected, 5)
    assert ("batches of 8, fit of 6" in caplog.text) == (first_step == 0)


def test_the_checkpoint_has_the_last_word_on_batches_that_fit():
    data = GlobalBatches(np.zeros(24), np.zeros(24), batch_size=6)
    restore_data(data, {**data.state(), "batch_size": 8}, 1)
    assert data.batch_size == 8


def test_other_samples_are_told_apart_and_rounding_is_not():
    def check(*every):
        require_same_samples([GlobalBatches(x, batch_size=2)._source.probe() for x in every])

    x, words = np.linspace(1, 2, 12).reshape(6, 2), ["u", "v"] * 3
    check(x, x.copy(), x * (1 + 1e-6))
    for other in (x[::-1].copy(), x[:, :1], x + 1):
        with pytest.raises(ExchangeError, match="other samples on rank 1 than on rank 0"):
            check(x, other)
    check({"a": x, "b": words}, {"a": x, "b": list(words)})
    with pytest.raises(ExchangeError, match="shared out by hand"):
        check({"a": x, "b": words}, {"a": x, "b": words[::-1]})


def test_parameters_of_a_finished_fit_are_plain():
    data = GlobalBatches(*arrays(), batch_size=BATCH)
    callbacks = [BroadcastGlobalVariablesCallback(0)]
    history = build().fit(data, epochs=1, verbose=0, callbacks=callbacks)
    assert type(history.params["steps"]) is int and history.params["steps"] == STEPS
