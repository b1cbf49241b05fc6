"""BackupAndRestore in one process: `Checkpoint` with Keras's arguments, deleted at the end."""

import contextlib
import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.ranks import InterruptAt, Interruption
from tests.unit.checkpoint_model import (
    BATCH,
    STEPS,
    Act,
    arrays,
    fit,
    interrupt,
    job,  # noqa: F401
    require_equal,
    steps_in,
)
from tests.unit.test_adaptive_batch_size import adaptive, make_data, make_model
from tfscale.callbacks import BackupAndRestore, RankZero
from tfscale.checkpoints import list_checkpoints
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches


class Killed(BaseException):
    """Nothing handles it, as nothing does SIGKILL."""


@functools.cache
def undisturbed():
    return fit(None)[0]


def kill_before(monkeypatch, number):
    """Kill a run before the n-th time that a file is renamed or deleted; return what is left."""
    left = [number]

    def killing(act):
        def kill(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return act(*arguments, **options)

        return kill

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))
    return left


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"double_checkpoint": True}, {"save_freq": 5}])
def test_killed_at_any_place(tmp_path, monkeypatch, options):
    number, left, stride = 0, [-1], 3 if options else 1
    while left[0] < 0:
        folder = tmp_path / f"{number}"
        with monkeypatch.context() as patch:
            left = kill_before(patch, number)
            with contextlib.suppress(Killed):
                fit(BackupAndRestore(folder, **options))
        model, _ = fit(BackupAndRestore(folder, **options))
        assert not folder.exists()
        require_equal(model, undisturbed())
        number += stride
    assert number > 6


def test_one_backup_stays_or_two(tmp_path):
    for name, options, steps in (
        ("one", {}, [8]),
        ("two", {"double_checkpoint": True}, [8, 4]),
        ("within", {"save_freq": 5}, [5]),
        ("last step of an epoch", {"save_freq": 4}, [8]),
    ):
        fit(BackupAndRestore(tmp_path / name, **options), Act(9, interrupt))
        assert steps_in(tmp_path / name) == steps
        model, batches = fit(BackupAndRestore(tmp_path / name, **options))
        assert len(batches) == 12 - steps[0]
        require_equal(model, undisturbed())


def test_a_damaged_backup(tmp_path):
    """The one before, where it is kept; else no start, and a text that says why."""
    for is_double in (True, False):
        folder = tmp_path / f"{is_double}"
        fit(BackupAndRestore(folder, double_checkpoint=is_double), Act(9, interrupt))
        os.truncate(list_checkpoints(folder)[0].path / "rank-00000.safetensors", 100)
        backup = BackupAndRestore(folder, double_checkpoint=is_double)
        if is_double:
            model, batches = fit(backup)
            assert len(batches) == 12 - 4
            require_equal(model, undisturbed())
        else:
            with pytest.raises(ConfigError, match="damaged ones only: .* has 100 bytes instead"):
                fit(backup)


def test_a_backup_that_is_kept_has_the_last_epoch(tmp_path):
    fit(BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    model, batches = fit(BackupAndRestore(tmp_path))
    assert len(batches) == STEPS
    require_equal(model, undisturbed())
    # What follows in the same program begins where it is told to.
    data = GlobalBatches(*arrays(), batch_size=BATCH, seed=2)
    assert model.fit(data, epochs=2, verbose=0).epoch == [0, 1]


def test_what_keras_accepts(tmp_path):
    for wrong in ({"backup_dir": ""}, {"save_freq": "batch"}, {"save_freq": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            BackupAndRestore(**{"backup_dir": tmp_path, **wrong})
    backup = BackupAndRestore(tmp_path, save_freq=3)
    assert (backup.backup_dir, backup.save_freq) == (tmp_path, 3)


def test_what_others_keep_in_the_folder_stays(tmp_path):
    (tmp_path / "note").touch()
    fit(BackupAndRestore(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def interrupted(backup, at=(2, 0), **options):
    data = make_data()
    callbacks = [BackupAndRestore(backup, **options), adaptive(data), InterruptAt(*at)]
    with contextlib.suppress(Interruption):
        make_model().fit(data, epochs=4, verbose=0, callbacks=callbacks)


def test_another_ladder_is_refused(tmp_path):
    interrupted(tmp_path)
    data = make_data()
    callbacks = [BackupAndRestore(tmp_path), adaptive(data, 48)]
    with pytest.raises(ConfigError, match=r"the backup has \[6, 12, 24\]"):
        make_model().fit(data, epochs=4, verbose=0, callbacks=callbacks)


class Count(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.n, self.restored_at = 0, None

    def on_epoch_end(self, epoch, logs=None):
        self.n += 1

    def backup_state(self):
        return {"n": self.n}

    def restore_state(self, state, epoch):
        self.n, self.restored_at = state["n"], epoch


@pytest.mark.parametrize("wrap", [lambda count: count, RankZero])
def test_a_callback_of_ones_own_goes_on(tmp_path, wrap):
    fit(BackupAndRestore(tmp_path), Act(9, interrupt), more=[wrap(Count())])
    count = Count()
    fit(BackupAndRestore(tmp_path), more=[wrap(count)])
    assert (count.n, count.restored_at) == (3, 2)


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(1), keras.layers.Dense(1)
        self.build((None, 2))

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)
        self.built = True

    def compile(self):
        super().compile(keras.optimizers.SGD(0.1), run_eagerly=True)
        self.own = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.other(data) ** 2)
        self.own.apply(tape.gradient(loss, self.other.weights), self.other.weights)
        return {"loss": loss}


@pytest.mark.parametrize("is_built", [False, True])
def test_the_state_of_a_second_optimizer_needs_its_variables(tmp_path, is_built):
    """Otherwise moments would be 0 again, without a word."""

    def fit_twice(epochs, is_built=True):
        model = TwoOptimizers()
        model.compile()
        if is_built:
            model.own.build(model.other.weights)
        backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(np.ones((4, 2)), epochs=epochs, batch_size=2, verbose=0, callbacks=[backup])
        return model

    fit_twice(1, is_built=False)  # there is nothing to read yet
    if is_built:
        assert int(fit_twice(2).own.iterations) == 4
    else:
        with pytest.raises(ConfigError, match="build those beside the compiled one before fit"):
            fit_twice(2, is_built=False)
