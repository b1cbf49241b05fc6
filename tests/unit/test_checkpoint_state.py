"""State that a checkpoint restores in optimizers, data and callbacks."""

import keras
import numpy as np
import pytest

from tests.unit.checkpoint_model import (
    STEPS,
    Act,
    Count,
    build,
    fit,
    interrupt,
    job,  # noqa: F401
    require_equal,
)
from tests.unit.served_batches import as_rank
from tfscale.callbacks import (
    BackupAndRestore,
    Checkpoint,
    ParameterAveraging,
    RankZero,
)
from tfscale.checkpoints.files import Part
from tfscale.checkpoints.resumable import BestWeights, read_counters, restore_counters
from tfscale.checkpoints.snapshot_restore import Reader, StatesOf
from tfscale.config import ConfigError, ExchangeError
from tfscale.data import GlobalBatches
from tfscale.data.global_batches import restore_data
from tfscale.exchange.residuals import pending_in
from tfscale.exchange.states import Saved, Scope
from tfscale.fit.agreement import require_same_samples
from tfscale.internals import keras as internals
from tfscale.testing import pretend_rank, require_identical

callbacks, optimizers = keras.callbacks, keras.optimizers


@pytest.mark.parametrize("are_saved", [True, False])
def test_best_weights_of_before_an_interruption(are_saved, tmp_path, caplog, monkeypatch):
    """A checkpoint of an earlier version has none: the best epoch is sought again."""
    if not are_saved:
        monkeypatch.setattr(BestWeights, "saved", lambda *_: Saved())
    weights = {}

    def more():
        def score(epoch, logs):
            logs["score"] = (0.1, 0.5, 0.2, 0.3)[epoch]
            weights[epoch] = best.model.get_weights()

        options = {"patience": 9, "mode": "min", "restore_best_weights": True}
        best = callbacks.EarlyStopping("score", **options)
        return [callbacks.LambdaCallback(on_epoch_end=score), best]

    fit(Checkpoint(tmp_path), Act(STEPS + 1, interrupt), epochs=4, more=more())
    model, _ = fit(Checkpoint(tmp_path), epochs=4, more=more())
    # Else neither epoch 0, whose weights are gone, nor the first of this run.
    require_identical(model.get_weights(), weights[0 if are_saved else 2])
    assert ("EarlyStopping on rank 0 seeks the best epoch again" in caplog.text) != are_saved


def test_averages_that_stand_in_for_weights_when_a_backup_is_written(tmp_path):
    def train(backup, act=None):
        model = build(optimizer=optimizers.Adam(0.01, use_ema=True))
        return fit(backup, act, model=model, more=[callbacks.SwapEMAWeights(swap_on_epoch=True)])[0]

    whole = train(None)
    train(BackupAndRestore(str(tmp_path)), Act(2 * STEPS + 1, interrupt))
    require_equal(train(BackupAndRestore(str(tmp_path))), whole)


def test_at_the_end_of_training_weights_and_averages_are_not_exchanged():
    swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
    swap._ema_weights_in_model = True
    for is_end, expected in ((False, True), (True, False)):
        (state,) = read_counters([swap], is_end)
        assert bool(state["numbers"]["_ema_weights_in_model"]) == expected


def test_executions_are_counted_as_this_keras_does(monkeypatch):
    """The second execution of an epoch ends: Keras 3.10 names its first step, later its last."""
    for has_last_step, together, named in ((1, 1, 1), (1, 3, 5), (0, 1, 1), (0, 3, 3)):
        monkeypatch.setattr(internals, "_HAS_LAST_STEP", has_last_step)
        assert internals.steps_until(build(steps_per_execution=together), named) == 2 * together


@pytest.mark.parametrize(
    ("size", "first_step", "expected"), [(3, 0, 6), (3, 2, None), (3, None, 6), (1, 1, 8)]
)
def test_batches_that_other_ranks_cannot_share(caplog, size, first_step, expected):
    data = as_rank(GlobalBatches(np.zeros(24), np.zeros(24), batch_size=6), 0, size)
    state = {**data.state(), "batch_size": 8, "epoch": 5}
    if expected is None:
        with pytest.raises(ConfigError, match="batch_size=8 in the checkpoint"):
            restore_data(data, state, first_step)
    else:
        restore_data(data, state, first_step)
        assert (data.batch_size, data.epoch) == (expected, 5)
        assert ("batches of 8, fit of 6" in caplog.text) == (first_step in (0, 1))
        caplog.clear()
        restore_data(data, data.state(), first_step)
        assert not caplog.text  # both have the same batches


def test_other_samples_are_told_apart_and_rounding_is_not():
    def check(*every):
        require_same_samples([GlobalBatches(x, batch_size=2)._source.probe() for x in every])

    x, words = np.linspace(1, 2, 12).reshape(6, 2), ["u", "v"] * 3
    pictures = np.zeros((2, 6, 28, 28))
    pictures[1, :, 10:18, 10:18] = 1  # what lies within their border
    check(x, x.copy(), x * (1 + 1e-6))
    for first, other in ((x, x[::-1].copy()), (x, x[:, :1]), (x, x + 1), pictures):
        with pytest.raises(ExchangeError, match="other values on rank 1 than on rank 0"):
            check(first, other)
    assert GlobalBatches(np.zeros((2, 0)), batch_size=2)._source.probe() == [[], [], []]
    check({"a": x, "b": words}, {"a": x, "b": list(words)})
    with pytest.raises(ExchangeError, match="shared out by hand"):
        check({"a": x, "b": words}, {"a": x, "b": words[::-1]})


OTHERS = {
    "Adamax .* Adam ": (build, lambda: build(optimizer=optimizers.Adamax(0.01))),
    "Lion .* Adagrad": (
        lambda: build(optimizer=optimizers.Adagrad(0.01)),
        lambda: build(optimizer=optimizers.Lion(0.01)),
    ),
    r"velocity, momentum\); .* velocity, gradient\)": (
        lambda: build(optimizer=optimizers.RMSprop(0.01, centered=True)),
        lambda: build(optimizer=optimizers.RMSprop(0.01, momentum=0.9)),
    ),
    "LossScaleOptimizer of SGD with 6 .* the checkpoint has SGD with 2": (
        lambda: build(optimizer=optimizers.SGD(0.01)),
        lambda: build(optimizer=optimizers.LossScaleOptimizer(optimizers.SGD(0.01))),
    ),
    "model must be that of the checkpoint": (build, lambda: build(units=6)),
}


@pytest.mark.parametrize("text", OTHERS)
def test_another_model_or_optimizer_is_refused(tmp_path, text):
    """Also an optimizer of as many variables."""
    own, other = OTHERS[text]
    fit(Checkpoint(tmp_path, 2), Act(3, interrupt), model=own())
    with pytest.raises(ConfigError, match=text):
        fit(Checkpoint(tmp_path, 2), model=other())
    assert len(fit(Checkpoint(tmp_path, 2), model=own())[1]) == 12 - 2


def test_numbers_go_to_the_same_one_of_the_same_class(caplog):
    """Wherever in the list it is; those that find no partner are named."""
    stop, plateau = callbacks.EarlyStopping, callbacks.ReduceLROnPlateau

    def waits(*values):
        made = [kind("loss") for kind, _ in values]
        for callback, (_, wait) in zip(made, values, strict=True):
            callback.wait = wait
        return made

    saved = [callbacks.ModelCheckpoint("m.keras"), *waits((stop, 1), (plateau, 2), (stop, 3))]
    states = read_counters(saved)
    here = waits((plateau, 0), (stop, 0), (stop, 0), (plateau, 7))
    restore_counters(here, states, is_own=True)
    assert [callback.wait for callback in here] == [2, 1, 3, 7]
    assert [record.getMessage() for record in caplog.records] == [
        "ReduceLROnPlateau on rank 0 counts from 0: its numbers were not saved.",
        "The numbers of ModelCheckpoint on rank 0 are not used: fit has no such callback.",
    ]
    caplog.clear()
    here = waits((stop, 0))
    restore_counters(here, states, is_own=False)  # another rank's: it may have had more
    assert here[0].wait == 1 and not caplog.records


def test_at_another_number_of_ranks_the_first_one_s_numbers_count():
    parts = [Part({"groups": [[0, 1, 2]]}, {}) for _ in range(3)]
    for size, rank, source in ((3, 2, 2), (2, 1, 0), (4, 3, 0)):
        with pretend_rank(rank, size):
            assert Reader(parts).source == source


@pytest.mark.parametrize("is_in_front", [False, True])
def test_more_epochs_begin_with_their_own_learning_rate(tmp_path, is_in_front):
    def train(*checkpoint, epochs):
        rates = callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        first, more = ([rates], []) if is_in_front else ([], [rates])
        return fit([*first, *checkpoint], epochs=epochs, more=more)[0]

    train(Checkpoint(tmp_path), epochs=3)
    require_equal(train(Checkpoint(tmp_path), epochs=4), train(epochs=4))


def test_best_weights_that_are_put_back_in_front(tmp_path):
    """The checkpoint has the last ones, wherever it stands."""
    last = []
    best = callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    note = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: last.append(note.model.get_weights())
    )
    model, _ = fit([note, best, Checkpoint(tmp_path)])
    assert not np.array_equal(model.get_weights()[0], last[-1][0])
    again, _ = fit([note, best, Checkpoint(tmp_path)], epochs=len(last))
    require_identical(again.get_weights(), last[-1])


class Begins(Count):
    """Begins with what was restored, which must come before training begins."""

    restored = 0

    def on_train_begin(self, logs=None):
        self.n = self.restored

    def restore_state(self, state, epoch):
        self.restored = state["n"]


@pytest.mark.parametrize("restore", [BackupAndRestore, Checkpoint])
def test_states_come_before_training_begins_wherever_callbacks_stand(tmp_path, restore):
    """Also in another order than that of the run that was saved."""
    first = [Begins(), RankZero(Begins()), Count(), ParameterAveraging()]
    fit([*first, restore(tmp_path)], Act(9, interrupt))
    begins, inside, count = Begins(), Begins(), Count()
    fit([restore(tmp_path), count, ParameterAveraging(), RankZero(inside), begins])
    assert (begins.n, inside.n, count.n) == (3, 3, 3)


@pytest.mark.parametrize("wrap", [lambda count: count, RankZero])
@pytest.mark.parametrize("restore", [BackupAndRestore, Checkpoint])
def test_a_callback_of_ones_own_goes_on(tmp_path, restore, wrap):
    """It must be there again, and in the same wrapper."""
    fit(restore(tmp_path), Act(9, interrupt), more=[wrap(Count())])
    with pytest.raises(ConfigError, match=r"has the states of .*Count"):
        fit(restore(tmp_path), more=[Count()] if wrap is RankZero else [])
    count = Count()
    fit(restore(tmp_path), more=[wrap(count)])
    assert (count.n, count.restored_at) == (3, 2)


def test_what_is_pending_in_groups_is_averaged():
    """Of two groups of two ranks; the second part of each sum is with its owner."""
    parts = []
    for rank in range(4):
        arrays = {"residual0/0": np.full(4, rank + 1.0), "owner0/0": np.full(2, 10.0 * rank)}
        info = {"groups": [[0, 1], [2, 3]], "residuals": {"0/0": ([0, 2, 4], 0.5)}}
        parts.append(Part(info, arrays))
    reader = Reader(parts)
    first, second = np.array([1.5, 1.5, 11.5, 11.5]), np.array([23.5, 23.5, 33.5, 33.5])
    for groups, expected in (([[0, 1]], first), (reader.groups, (first + second) / 2)):
        saved = StatesOf(reader, 0, Scope([], [], True), is_exact=False, groups=groups)
        require_identical([pending_in(saved, "0")], [expected])
