"""BackupAndRestore in one process: `Checkpoint` with Keras's arguments, deleted at the end."""

import contextlib
import functools
import os

import keras
import pytest
import tensorflow as tf

from tests.unit import callback_models
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
from tfscale.callbacks import BackupAndRestore
from tfscale.checkpoints import list_checkpoints
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.testing import require_identical


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


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, [8]), ({"double_checkpoint": True}, [8, 4]), ({"save_freq": 5}, [5]),
     ({"save_freq": 4}, [8])],
    ids=["one", "two", "within an epoch", "last step of an epoch"],
)  # fmt: skip
def test_one_backup_stays_or_two(tmp_path, options, steps):
    fit(BackupAndRestore(tmp_path, **options), Act(9, interrupt))
    assert steps_in(tmp_path) == steps
    model, batches = fit(BackupAndRestore(tmp_path, **options))
    assert len(batches) == 12 - steps[0]
    require_equal(model, undisturbed())


def test_a_damaged_backup_is_no_start(tmp_path):
    fit(BackupAndRestore(tmp_path), Act(9, interrupt))
    os.truncate(list_checkpoints(tmp_path)[0].path / "rank-00000.safetensors", 100)
    with pytest.raises(ConfigError, match="damaged ones only: .* has 100 bytes instead"):
        fit(BackupAndRestore(tmp_path))


def test_a_backup_that_is_kept_has_the_last_epoch(tmp_path):
    fit(BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    model, batches = fit(BackupAndRestore(tmp_path))
    assert len(batches) == STEPS
    require_equal(model, undisturbed())
    # What follows in the same program begins where it is told to.
    data = GlobalBatches(*arrays(), batch_size=BATCH, seed=2)
    assert model.fit(data, epochs=2, verbose=0).epoch == [0, 1]


def test_what_others_keep_in_the_folder_stays(tmp_path):
    (tmp_path / "note").touch()
    backup = BackupAndRestore(tmp_path, save_freq=3)
    assert (backup.backup_dir, backup.save_freq) == (tmp_path, 3)  # as Keras's
    fit(backup)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def fit_two(folder, epochs, built=lambda model: ()):
    """Train with two optimizers, built on these variables before; else Keras does in a step."""
    keras.utils.set_random_seed(2)
    model = callback_models.TwoOptimizers(0.1)
    model(callback_models.data(0)[0])
    callback_models.compiled(model)
    for optimizer, variables in zip([model.optimizer, *model.others], built(model), strict=False):
        optimizer.build(variables)
    callback_models.fit(model, [BackupAndRestore(folder, delete_checkpoint=False)], epochs=epochs)
    return model


def parts(model):
    return model.first.trainable_variables, model.second.trainable_variables


@pytest.mark.parametrize("built", [lambda model: (), parts], ids=["in a step", "before"])
def test_each_optimizer_resumes_with_what_it_trained(tmp_path, built):
    fit_two(tmp_path / "cut", 1)
    resumed, whole = fit_two(tmp_path / "cut", 2, built), fit_two(tmp_path / "whole", 2)
    require_equal(resumed, whole)
    require_identical(resumed.others[0].variables, whole.others[0].variables)
    assert int(resumed.others[0].iterations) == 4
    require_equal(fit_two(tmp_path / "cut", 2), whole)  # nothing is left to train


def test_an_optimizer_that_was_built_on_more_variables_is_an_error(tmp_path):
    fit_two(tmp_path, 1)
    with pytest.raises(ConfigError, match="build it on the variables that it trained"):
        fit_two(tmp_path, 2, lambda model: [model.trainable_variables])


class Backwards(keras.Sequential):
    """Hands the optimizer the last weight first: two of one shape, which are easily confused."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables[::-1]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - tf.cast(y, tf.float32)))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_moments_stay_with_their_weights(tmp_path):
    def run(folder, epochs, is_built=False):
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Dense(3, use_bias=False) for _ in range(2)]
        model = callback_models.compiled(Backwards([keras.Input((3,)), *layers]))
        if is_built:
            model.optimizer.build(model.trainable_variables)
        backup = BackupAndRestore(tmp_path / folder, delete_checkpoint=False)
        callback_models.fit(model, [backup], epochs=epochs)
        return model

    run("cut", 1)
    with pytest.raises(ConfigError, match="in their order. Received: .*kernel, .*kernel; the"):
        run("cut", 2, is_built=True)
    require_equal(run("cut", 2), run("whole", 2))
