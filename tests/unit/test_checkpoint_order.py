"""Callbacks in front of those that restore: what is set right, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.checkpoint_model import (
    BATCH,
    Act,
    arrays,
    build,
    fit,
    interrupt,
    job,  # noqa: F401
    require_equal,
    steps_in,
)
from tests.unit.test_backup import Count
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    ParameterAveraging,
    RankZero,
)
from tfscale.callbacks import checkpoint as module
from tfscale.config import ConfigError


class Begins(Count):
    """Forgets an earlier `fit`, so its state must come before."""

    def on_train_begin(self, logs=None):
        self.n = 0


def test_more_epochs_begin_with_the_rate_of_a_callback_in_front(tmp_path):
    def schedule():
        return [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))]

    whole, _ = fit(schedule(), epochs=4)
    fit([*schedule(), Checkpoint(tmp_path)])
    require_equal(fit([*schedule(), Checkpoint(tmp_path)], epochs=4)[0], whole)


def test_a_rate_in_front_that_follows_the_present_one(tmp_path):
    def halve():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]

    whole, _ = fit(halve())
    fit([*halve(), Checkpoint(tmp_path, 1)], Act(6, interrupt))
    require_equal(fit([*halve(), Checkpoint(tmp_path, 1)])[0], whole)


class StopAfter(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def test_a_stop_in_front_at_the_end_of_an_epoch_of_unknown_length(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH).filter(lambda *_: True)
    fit([StopAfter(), Checkpoint(tmp_path)], data=data)
    assert steps_in(tmp_path) == [8, 4]


def test_best_weights_that_are_put_back_in_front(tmp_path):
    """The checkpoint has the last ones, wherever it stands."""
    last = []
    best = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: last.append(note.model.get_weights())
    )
    model, _ = fit([note, best, Checkpoint(tmp_path)])
    assert not np.array_equal(model.get_weights()[0], last[-1][0])
    again, _ = fit([note, best, Checkpoint(tmp_path)], epochs=len(last))
    for own, wanted in zip(again.get_weights(), last[-1], strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_a_state_that_would_come_too_late_is_refused(tmp_path):
    for restore, early, name in (
        (Checkpoint, Begins(), "Begins"),
        (BackupAndRestore, Count(), "Count"),
        (BackupAndRestore, ParameterAveraging(), "ParameterAveraging"),
        (BackupAndRestore, RankZero(Begins()), "RankZero"),
        (BackupAndRestore, BroadcastGlobalVariablesCallback(0), "BroadcastGlobalVariables"),
    ):
        text = f"{restore.__name__} comes before .* Received: {name}.* with it. Put it first"
        with pytest.raises(ConfigError, match=text):
            fit([early, restore(tmp_path)])
    with pytest.raises(ConfigError, match="no other one is with it. Received: BackupAndRestore"):
        fit([Checkpoint(tmp_path), BackupAndRestore(tmp_path)])


def test_the_order_on_another_rank_is_refused_on_all(tmp_path, monkeypatch):
    every = [[], ["Begins"]]
    monkeypatch.setattr(module.objects, "allgather_object", lambda own, name: every)
    with pytest.raises(ConfigError, match="Received: Begins"):
        Checkpoint(tmp_path)._require_order([])


def test_a_state_inside_of_rank_zero_is_in_the_checkpoint(tmp_path):
    fit(Checkpoint(tmp_path), Act(9, interrupt), more=[RankZero(Begins())])
    with pytest.raises(ConfigError, match=r"has the states of .*'RankZero\(Begins\)'"):
        fit(Checkpoint(tmp_path), model=build(), more=[Begins()])
    count = Begins()
    count.on_train_begin = lambda logs=None: None
    fit(Checkpoint(tmp_path), more=[RankZero(count)])
    assert (count.n, count.restored_at) == (3, 2)
