"""A schedule that follows samples when the batch grows."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale.config import ConfigError

schedules = keras.optimizers.schedules
SCHEDULES = [
    schedules.CosineDecay(0.1, 80, warmup_target=0.4, warmup_steps=10),
    schedules.ExponentialDecay(0.1, 20, 0.5),
    schedules.PiecewiseConstantDecay([20, 60], [0.1, 0.01, 0.001]),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_follows_samples(schedule):
    """Ten steps, then steps of twice the batch: step 10 + i stands where 10 + 2 i would."""

    def expected(step, scale=1.0):
        return pytest.approx(scale * float(schedule(tf.constant(step, tf.float32))), rel=1e-5)

    def rate(step):
        return float(traced(tf.constant(step, tf.int64)))

    wrapped = tfscale.ScalableSchedule(schedule)
    traced = tf.function(lambda step: wrapped(step))
    for step in (0, 5, 20, 21, 79, 200):
        assert rate(step) == expected(step)
    wrapped.rescale(2.0, 2.0, 10)
    for i in (0, 1, 7, 30):
        assert rate(10 + i) == expected(10 + 2 * i, 2.0)
    wrapped.rescale(0.5, 4.0, 20)
    assert rate(25) == expected(10 + 20 + 4 * 5, 0.5) and wrapped.scale == 0.5
    other = tfscale.ScalableSchedule(schedule)
    assert float(other(25)) == expected(25)  # eager, and not rescaled
    other.restore(wrapped.state())
    assert float(other(25)) == float(wrapped(25))


def test_an_optimizer_saves_the_schedule_inside(tmp_path):
    wrapped = tfscale.ScalableSchedule(SCHEDULES[0])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(wrapped), "mse")
    model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer._learning_rate) is schedules.CosineDecay
    assert type(pickle.loads(pickle.dumps(wrapped))) is schedules.CosineDecay
    for made in (copy.copy(wrapped), copy.deepcopy(wrapped)):
        assert type(made) is tfscale.ScalableSchedule
        assert made.__wrapped__ is SCHEDULES[0]


@pytest.mark.parametrize("given", [0.1, tfscale.ScalableSchedule(SCHEDULES[0])])
def test_only_schedules_are_wrapped_and_once(given):
    with pytest.raises(ConfigError, match="must be a Keras LearningRateSchedule"):
        tfscale.ScalableSchedule(given)
