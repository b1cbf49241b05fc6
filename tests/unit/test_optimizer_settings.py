"""Settings of Keras's optimizers that a distributed one, or what compares ranks, must not lose."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.ranks import InterruptAt, Interruption
from tests.helpers.single_job import single_job  # noqa: F401
from tests.unit.callback_models import compiled, functional
from tfscale import DistributedOptimizer
from tfscale.callbacks import BackupAndRestore
from tfscale.checkpoints import variables as model_state
from tfscale.fit import agreement
from tfscale.internals.optimizers import optimizers_of, unbuilt

SGD, Adam, LSO = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer


def weight():
    return keras.Variable(np.array([1.0, 2.0]), dtype="float64", name="weight")


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    ("way", "frequency", "spoiled"),
    [
        *((way, frequency, None) for way in ("plain", "scaled") for frequency in (None, 2)),
        *((way, 2, spoiled) for way in ("scaled", "skipped") for spoiled in (0, 2)),
    ],
)
def test_moving_averages_follow_updates(is_traced, way, frequency, spoiled):
    """Cycles of three batches average as plain updates with the sums of three do.

    Keras overwrites weights by updates, and with cycles by batches: every sixth of these. A cycle
    whose update is skipped leaves no trace.
    """
    options = {"use_ema": True, "ema_momentum": 0.5}
    plain = SGD(0.1, **options, ema_overwrite_frequency=frequency)
    inner = SGD(0.1, **options, ema_overwrite_frequency=frequency and 3 * frequency)
    policy = {"plain": "warn", "scaled": "ignore", "skipped": "skip"}[way]
    wrapped = LSO(inner) if way == "scaled" else inner
    ours = DistributedOptimizer(wrapped, backward_passes_per_step=3, nonfinite=policy)
    one, other = weight(), weight()
    ours.build([other])

    def apply(gradient):
        ours.apply([ours.scale_loss(gradient)], [other])

    step = tf.function(apply) if is_traced else apply
    for i, gradient in enumerate(np.arange(1.0, 6.0)[:, None] * np.array([1.0, -2.0])):
        if i == spoiled:
            for factor in (1.0, np.inf, 1.0):
                step(tf.constant(factor * gradient))
            assert int(ours.iterations.numpy()) == 3 * spoiled
        plain.apply([tf.constant(6 * gradient)], [one])
        for factor in (1.0, 2.0, 3.0):
            step(tf.constant(factor * gradient))
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-12)
        own, expected = (o._model_variables_moving_average[0].numpy() for o in (inner, plain))
        np.testing.assert_allclose(own, expected, rtol=1e-12)


def test_accumulators_of_reduced_gradients_are_equal_on_all_ranks():
    for wrap, are_common in ((DistributedOptimizer, True), (lambda optimizer: optimizer, False)):
        inner = SGD(gradient_accumulation_steps=2)
        model = compiled(functional(), optimizer=wrap(inner))
        model.optimizer.build(model.trainable_variables)
        common = {id(variable) for variable in model_state.optimizer_variables(model)}
        assert len(inner._accumulated_gradients) == 6
        assert {id(v) in common for v in inner._accumulated_gradients} == {are_common}


class Networks(keras.Model):
    """Has optimizers in containers, as models with several networks do."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Adam(), SGD(), SGD()
        self.rules = {"g": self.first, "d": [self.second, (self.third, self.first)]}
        self.more = {"again": self.rules}


def test_optimizers_in_containers_are_found():
    model = Networks()
    assert optimizers_of(model) == [model.first, model.second, model.third]


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Holds another schedule, which its settings hold as it is."""

    def __init__(self, after):
        self.after = after

    def __call__(self, step):
        return self.after(step)

    def get_config(self):
        return {"after": self.after, "scale": weight_of}


class Silent(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


def weight_of(value):
    return value


def told(rule):
    return agreement._optimizer(rule, True)


def test_settings_that_are_objects_compare_by_what_they_say():
    def decaying(rate):
        return told(SGD(WarmUp(keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.5))))

    assert decaying(0.1) == decaying(0.1) != decaying(0.2)
    assert "0x" not in str(decaying(0.1)) and "weight_of" in str(decaying(0.1))
    assert told(SGD(WarmUp(Silent()))) == told(SGD(WarmUp(Silent())))


def test_a_scaled_optimizer_with_a_schedule_that_tells_no_settings():
    scaler = LSO(SGD(Silent(), momentum=0.9), initial_scale=8.0)
    assert told(scaler).items() >= {"initial_scale": "8.0", "inner momentum": "0.9"}.items()
    other = unbuilt(scaler)
    assert other.initial_scale == 8.0 and other.inner_optimizer.momentum == 0.9
    assert other.inner_optimizer._learning_rate is scaler.inner_optimizer._learning_rate


def test_a_backup_amid_a_cycle_keeps_its_gradients(tmp_path):
    """Five batches in cycles of two: the fifth of one epoch and the first of the next."""

    def train(*more):
        keras.utils.set_random_seed(2)
        optimizer = DistributedOptimizer(SGD(0.1), backward_passes_per_step=2)
        model = compiled(functional(), optimizer=optimizer)
        x = np.arange(30, dtype="float32").reshape(10, 3) / 30
        options = {"shuffle": False, "batch_size": 2, "epochs": 2, "verbose": 0}
        with contextlib.suppress(Interruption):
            model.fit(x, x[:, :1], callbacks=[BackupAndRestore(str(tmp_path)), *more], **options)
        return model

    whole = train()
    train(InterruptAt(1, 0))
    model = train()
    assert int(model.optimizer.iterations) == 10 and model.optimizer.accumulator.n_waiting == 0
    for own, wanted in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(own, wanted)
