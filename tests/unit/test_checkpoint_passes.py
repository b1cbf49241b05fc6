"""Resuming where several epochs take their steps from one pass over plain data."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.unit.checkpoint_model import (
    Act,
    Interruption,
    build,
    interrupt,
    job,  # noqa: F401
    require_equal,
)
from tfscale.callbacks import Checkpoint
from tfscale.data.global_batches import continue_epoch
from tfscale.internals.stack import running_fit

pytestmark = pytest.mark.slow

BATCHES = 6


def fit(*callbacks, data=None, per_epoch, epochs=3, together=1, **more):
    model = build(run_eagerly=True, steps_per_execution=together)
    x = np.random.default_rng(3).normal(size=(BATCHES * 4, 3))
    y = x[:, :2]
    if data is None:
        data = {"x": x, "y": y, "batch_size": 4, "shuffle": False}
    else:
        data = {"x": data(x, y)}
    counted = Act(-1, None)
    history = {}
    options = {"steps_per_epoch": per_epoch, "epochs": epochs, "verbose": 0, **more}
    with contextlib.suppress(Interruption):
        history = model.fit(**data, **options, callbacks=[*callbacks, counted]).history
    return model, counted.batches, history


def dataset(x, y):
    """Return data of a length that Keras knows."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"per_epoch": 6}, (1, 7)),
        ({"per_epoch": 3}, (1, 4, 7)),
        ({"per_epoch": 2}, (1, 3, 4)),
        # Keras takes whole executions: an epoch of 3 steps, 2 at a time, takes 4 batches.
        ({"per_epoch": 3, "together": 2}, (2, 3)),
        ({"per_epoch": 4, "together": 2}, (2, 3)),
        ({"per_epoch": 3, "initial_epoch": 5, "epochs": 8}, (1, 4)),
        ({"per_epoch": 3, "data": dataset}, (5,)),
    ],
)
def test_steps_go_on_where_the_pass_was(tmp_path, options, stops):
    whole, numbers, history = fit(**options)
    if "together" not in options:
        assert len(numbers) == 3 * options["per_epoch"]
    for stop in stops:
        folder = tmp_path / f"{stop}"
        fit(Checkpoint(folder, 1), Act(stop, interrupt), **options)
        model, rest, continued = fit(Checkpoint(folder, 1), **options)
        assert rest == numbers[stop:], stop
        require_equal(model, whole)
        assert continued["loss"] == history["loss"][-len(continued["loss"]) :], stop


def test_batches_of_another_size_than_fit_begins_with(tmp_path):
    """Keras counts the steps of the program's batches until the epoch begins."""
    x = np.random.default_rng(3).normal(size=(BATCHES * 4, 3))

    def fit_batches(size, *callbacks):
        model, counted = build(run_eagerly=True), Act(-1, None)
        data = tfscale.data.GlobalBatches(x, x[:, :2], batch_size=size)
        with contextlib.suppress(Interruption):
            model.fit(data, epochs=2, verbose=0, callbacks=[*callbacks, counted])
        return model, counted.batches

    _, numbers = fit_batches(4)
    fit_batches(4, Checkpoint(tmp_path, 1), Act(4, interrupt))
    model, rest = fit_batches(8, Checkpoint(tmp_path, 1))  # 3 steps: fewer than were made
    assert rest[:2] == numbers[4:6] == [4, 5]
    assert int(model.optimizer.iterations) == 4 + len(rest)


def test_an_epoch_that_became_shorter_has_a_step_left():
    """Shares of more ranks are smaller: an epoch without a step would log a loss of 0."""
    seen = []

    class Continue(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                seen.append(continue_epoch(running_fit().epochs, epoch, BATCHES + 3))

    _, numbers, history = fit(Continue(), per_epoch=None, epochs=2)
    assert seen == [BATCHES - 1] and numbers == [*range(BATCHES), BATCHES - 1]
    assert min(history["loss"]) > 0
    _, numbers, history = fit(Continue(), per_epoch=4, epochs=2)  # the second has two steps
    assert seen == [BATCHES - 1, 1] and numbers == [0, 1, 2, 3, 1]
    assert min(history["loss"]) > 0


def test_schedules_count_micro_batches():
    """Where Keras accumulates, it asks the schedule with their number."""
    from tfscale.callbacks.learning_rate import AdaptiveRate

    schedule = tfscale.ScalableSchedule(keras.optimizers.schedules.CosineDecay(0.1, 100))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(schedule, gradient_accumulation_steps=4), "mse")
    model.fit(np.ones((40, 3)), np.ones((40, 2)), batch_size=2, verbose=0)  # 20 micro-batches
    AdaptiveRate(model, momentum_correction=False).rescale(1.0, 2.0)
    assert float(schedule(20)) == pytest.approx(float(schedule.__wrapped__(20)))
    assert float(schedule(30)) == pytest.approx(float(schedule.__wrapped__(40)))
