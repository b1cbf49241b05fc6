"""A backup that was interrupted while it was written, or damaged: whole, or refused."""

import contextlib
import functools
import json
import logging
import os
import shutil

import keras
import pytest

from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.checkpoint_model import (
    BATCH,
    STEPS,
    Act,
    Interruption,
    arrays,
    build,
    interrupt,
    require_equal,
)
from tfscale.callbacks import BackupAndRestore
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches

EPOCHS = 3
WEIGHTS, METADATA = "latest.weights.h5", "training_metadata.json"


class Killed(BaseException):
    """Nobody handles it, as nobody does SIGKILL."""


def train(folder=None, act=None, more=(), **options):
    """Return the model, and the epochs that were begun."""
    model, begun = build(), []
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
    backup = [BackupAndRestore(folder, **options)] if folder else []
    data = GlobalBatches(*arrays(), batch_size=BATCH, seed=2)
    callbacks = [*backup, *more, *([act] if act else []), note]
    with contextlib.suppress(Interruption, Killed):
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return model, begun


@pytest.fixture
def whole():
    """What an undisturbed run ends with."""
    return undisturbed()


@functools.cache
def undisturbed():
    return train()[0]


@pytest.fixture
def backup(tmp_path):
    """The beginning of the last epoch, with the one before as `double_checkpoint` keeps it."""
    folder = tmp_path / "backup"
    train(folder, Act(2 * STEPS, interrupt), double_checkpoint=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "callbacks-1-4.npz", "callbacks-2-8.npz", WEIGHTS, f"{WEIGHTS}.bkp",
        METADATA, f"{METADATA}.bkp",
    ]  # fmt: skip
    return folder


def kill_before_rename(monkeypatch, number):
    """Let a run be killed where a file would appear under its name, the n-th time that happens."""
    replace, left = os.replace, [number]

    def kill(source, target):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", kill)
    return left


@pytest.mark.parametrize("options", [{}, {"double_checkpoint": True}, {"save_freq": 5}])
def test_killed_at_any_place(tmp_path, monkeypatch, whole, options):
    """States, the copies of `double_checkpoint`, weights, epoch: whatever is not there any more."""
    number, left = 0, [-1]
    while left[0] < 0:
        folder = tmp_path / f"{number}"
        with monkeypatch.context() as patch:
            left = kill_before_rename(patch, number)
            train(folder, **options)
        model, begun = train(folder, **options)
        assert not folder.exists()
        if "save_freq" not in options:
            require_equal(model, whole)  # so epochs and weights went together
        elif left[0] < 0:
            assert begun[-1] == EPOCHS - 1
        number += 1
    assert number > 6


@pytest.mark.parametrize("change", ["epoch before", "nothing", "half"])
def test_killed_between_weights_and_epoch(backup, whole, change):
    """The epoch is that of the weights, whatever the file for Keras says."""
    path = backup / METADATA
    if change == "epoch before":
        shutil.copy(f"{path}.bkp", path)
        assert json.loads(path.read_text())["epoch"] == 1
    elif change == "nothing":
        path.unlink()
    else:
        path.write_text(path.read_text()[:9])
    told = []
    model, begun = train(backup, Act(0, lambda: told.append(json.loads(path.read_text()))))
    assert begun == [2] and told[0]["epoch"] == 2
    require_equal(model, whole)


def test_killed_while_weights_are_written(tmp_path, monkeypatch, whole):
    folder, save, n = tmp_path / "backup", keras.Model.save_weights, [0]

    def cut(model, filepath, overwrite=True, **options):
        save(model, filepath, overwrite=overwrite, **options)
        n[0] += 1
        if n[0] == 2:
            os.truncate(filepath, os.path.getsize(filepath) // 2)
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(keras.Model, "save_weights", cut)
        train(folder)
    (folder / ".rank0-1-latest.weights.h5").touch()  # of a run that could not remove it
    listed = []
    model, begun = train(folder, Act(0, lambda: listed.extend(sorted(os.listdir(folder)))))
    assert begun == [1, 2] and listed == ["callbacks-1-4.npz", WEIGHTS, METADATA]
    require_equal(model, whole)


def test_damaged_weights(backup, whole):
    """The ones before, where they are kept; else no start, and a text that says why."""
    os.truncate(backup / WEIGHTS, 100)
    model, begun = train(backup, double_checkpoint=True, delete_checkpoint=False)
    assert begun == [1, 2]
    require_equal(model, whole)
    os.truncate(backup / WEIGHTS, 100)
    (backup / f"{WEIGHTS}.bkp").unlink()
    with pytest.raises(ConfigError, match="A backup must be readable.*OSError.*truncated"):
        train(backup, double_checkpoint=True)


def test_weights_without_states_of_their_own(backup):
    (backup / "callbacks-2-8.npz").unlink()
    text = r"belong to them. Received: .* with weights of 8 updates, and states of \['1-4'\]"
    with pytest.raises(ConfigError, match=text):
        train(backup)


def test_keras_reads_it(backup):
    model = build()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(backup / WEIGHTS)
    assert int(model.optimizer.iterations) == 2 * STEPS
    again = keras.callbacks.BackupAndRestore(backup)
    again.set_model(build())
    again.on_train_begin()
    assert again.model._initial_epoch == 2


def test_a_backup_of_an_earlier_version(backup, whole, caplog):
    (backup / "callbacks-2-8.npz").rename(backup / "callbacks-2.npz")
    (backup / METADATA).write_text('{"epoch": 2, "batch": 0}')
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        model, begun = train(backup)
    assert begun == [2] and "an earlier version wrote it" in caplog.text
    require_equal(model, whole)


def test_callbacks_of_keras_go_on_counting(tmp_path):
    """The rate falls in the last epoch of both runs, after two without progress."""

    def more(noted):
        class Note(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                rate = float(self.model.optimizer.learning_rate)
                noted.append((epoch, rate, stop.wait, plateau.wait, stop.best))

        stop = keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=9)
        plateau = keras.callbacks.ReduceLROnPlateau("loss", min_delta=1e9, patience=2)
        return [stop, plateau, Note()]

    expected, rest = [], []
    train(more=more(expected))
    train(tmp_path / "b", Act(2 * STEPS, interrupt), more=more([]))
    train(tmp_path / "b", more=more(rest))
    assert rest == expected[2:] and rest[0][1] < expected[1][1]
