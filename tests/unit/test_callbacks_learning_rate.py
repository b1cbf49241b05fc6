"""Learning rate callbacks: schedules over epochs, warm-up, momentum correction."""

import math

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.ranks import float64
from tests.helpers.single_job import single_job  # noqa: F401
from tests.helpers.versions import HAS_MUON
from tfscale.callbacks import LearningRateScheduleCallback, LearningRateWarmupCallback
from tfscale.callbacks.learning_rate import AdaptiveRate
from tfscale.config import ConfigError
from tfscale.testing import pretend_rank

SGD = keras.optimizers.SGD
X = np.linspace(-1.0, 1.0, 8, dtype="float32").reshape(8, 1)
Y = 3.0 * X


def model_with(optimizer):
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    model.compile(optimizer, "mse")
    return model


def fit(model, callbacks, epochs, batch_size=4, x=X, y=Y):
    rates = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(model.optimizer.learning_rate.numpy())
    )
    options = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=[*callbacks, note], **options)
    return np.array(rates), history.history


def test_schedules_through_twenty_epochs():
    callbacks = [
        LearningRateScheduleCallback(0.1, lambda epoch: 1.0 + epoch, end_epoch=5, staircase=False),
        LearningRateScheduleCallback(0.1, 1.0, start_epoch=5, end_epoch=10),
        LearningRateScheduleCallback(0.1, 0.5, start_epoch=10, end_epoch=13),
        LearningRateScheduleCallback(0.1, lambda epoch: 1e-2 * epoch, start_epoch=15),
    ]
    rates, history = fit(model_with(SGD(0.7)), callbacks, epochs=20)
    later = [0.1, 0.05, 0.025, 0.025, 0.025, *(0.1 * 1e-2 * epoch for epoch in range(15, 20))]
    expected = [
        *(0.1 * (1.0 + batch / 2) for batch in range(10)),
        *[0.1] * 10,
        *np.repeat(later, 2),
    ]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], expected[1::2], rtol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum_correction", [False, True])
def test_momentum_correction_equals_numpy(momentum_correction, nesterov):
    x, y = X.astype("float64"), Y.astype("float64")
    options = {"staircase": False, "momentum_correction": momentum_correction}
    with float64():
        model = model_with(SGD(0.2, momentum=0.875, nesterov=nesterov))
        schedule = LearningRateScheduleCallback(0.2, lambda epoch: 1.0 / (1.0 + epoch), **options)
        fit(model, [schedule], epochs=4, x=x, y=y)
        result = float(model.get_weights()[0][0, 0])
    # Keras rounds the momentum to float32 on the way, so one that has no rounding is used.
    weight, velocity, old = 1.0, 0.0, 0.2
    for step in range(8):
        rate = 0.2 / (1.0 + step / 2)
        batch_x, batch_y = (a[4 * (step % 2) :][:4, 0] for a in (x, y))
        gradient = np.mean(2.0 * batch_x * (weight * batch_x - batch_y))
        corrected = velocity * (rate / old) if momentum_correction else velocity
        velocity = 0.875 * corrected - rate * gradient
        weight += 0.875 * velocity - rate * gradient if nesterov else velocity
        old = rate
    assert result == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "slots", "factor"),
    [
        (SGD(0.1, momentum=0.5), "momentums", 0.25),
        (keras.optimizers.RMSprop(0.1, momentum=0.5), "_momentums", 0.25),
        (tfscale.LARS(0.1, momentum=0.5), "velocities", 0.25),
        (keras.optimizers.LossScaleOptimizer(SGD(0.1, momentum=0.9)), "momentums", 0.25),
        (keras.optimizers.Adam(0.1), "_momentums", 1.0),
        pytest.param(
            *(keras.optimizers.Muon(0.1, momentum=0.5), "momentums", 1.0),  # these add up gradients
            marks=pytest.mark.skipif(not HAS_MUON, reason="Keras's Muon fails before 3.13"),
        ),
        (keras.optimizers.RMSprop(0.1, momentum=0.5), "_velocities", 1.0),  # and these squares
    ],
    ids=["sgd", "rmsprop", "lars", "loss_scale", "adam", "muon", "squares of rmsprop"],
)
def test_velocities_that_contain_rates_are_corrected(optimizer, slots, factor):
    model = model_with(optimizer)
    fit(model, [], epochs=1)
    slot = getattr(getattr(optimizer, "inner_optimizer", optimizer), slots)[0]
    before = slot.numpy().copy()
    assert np.all(before != 0)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(slot.numpy().copy())
    )
    fit(model, [LearningRateScheduleCallback(0.1, lambda epoch: 0.25), look], 1, batch_size=8)
    np.testing.assert_allclose(seen[0], before * factor, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_warmup_formula(size, capsys):
    with pretend_rank(size=size):
        warmup = LearningRateWarmupCallback(0.4, warmup_epochs=3, verbose=1)
        rates, _ = fit(model_with(SGD(0.4)), [warmup], epochs=5)
    reached = np.minimum(np.arange(1, 11) / 2, 3.0)
    np.testing.assert_allclose(rates, 0.4 / size * (reached * (size - 1) / 3 + 1), rtol=1e-6)
    assert "Epoch 3: finished gradual learning rate warmup to 0.4." in capsys.readouterr().out


def test_warmup_that_ends_within_an_epoch():
    warmup = LearningRateWarmupCallback(0.4, warmup_epochs=1.25, factor=4)
    rates, _ = fit(model_with(SGD(0.4)), [warmup], epochs=3)
    reached = np.minimum(np.arange(1, 7) / 2, 1.25)
    np.testing.assert_allclose(rates, 0.1 * (reached * 3 / 1.25 + 1), rtol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("together", [2, 3, 8])
def test_warmup_ends_where_steps_are_executed_together(together, momentum, capsys):
    """Eight steps per epoch: the rate is that of the first one of each execution."""
    model = model_with(SGD(0.4, momentum=momentum))
    model.compile(model.optimizer, "mse", steps_per_execution=together)
    warmup = LearningRateWarmupCallback(0.4, warmup_epochs=2, factor=4, verbose=1)
    rates, history = fit(model, [warmup], epochs=3, batch_size=1)
    first = np.array([together * (batch // together) for batch in range(8)])[::together]
    reached = np.concatenate([epoch + (first + 1) / 8 for epoch in (0, 1)])
    expected = [*(0.1 * (reached * 3 / 2 + 1)), *[0.4] * len(first)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert history["lr"][1] == pytest.approx(0.4)
    assert "finished gradual learning rate warmup to 0.4." in capsys.readouterr().out


@pytest.mark.parametrize("length", [0.5, 1.5])
def test_warmup_that_ends_within_an_execution(length, capsys):
    model = model_with(SGD(0.4))
    model.compile(model.optimizer, "mse", steps_per_execution=8)
    warmup = LearningRateWarmupCallback(0.4, warmup_epochs=length, factor=4, verbose=1)
    _, history = fit(model, [warmup], epochs=3, batch_size=1)
    assert history["lr"][math.ceil(length) - 1 :] == pytest.approx([0.4] * (4 - math.ceil(length)))
    assert "finished gradual learning rate warmup to 0.4." in capsys.readouterr().out


def test_unknown_steps_per_epoch():
    def batches():
        while True:
            yield X, Y

    model = model_with(SGD(0.1))
    with pytest.raises(ConfigError, match="Pass steps_per_epoch"):
        model.fit(batches(), callbacks=[LearningRateWarmupCallback(0.1)], verbose=0)
    callbacks = [LearningRateWarmupCallback(0.1, 1, steps_per_epoch=2)]
    model.fit(batches(), steps_per_epoch=2, callbacks=callbacks, verbose=0)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)


@pytest.mark.slow
def test_schedules_count_micro_batches():
    """Keras gives a schedule the number of micro-batches while it accumulates gradients."""
    schedule = tfscale.ScalableSchedule(keras.optimizers.schedules.CosineDecay(0.1, 100))
    model = model_with(SGD(schedule, gradient_accumulation_steps=4))
    model.fit(np.ones((40, 1)), np.ones((40, 1)), batch_size=2, verbose=0)  # 20 micro-batches
    AdaptiveRate(model, momentum_correction=False).rescale(1.0, 2.0)
    assert float(schedule(20)) == pytest.approx(float(schedule.__wrapped__(20)))
    assert float(schedule(30)) == pytest.approx(float(schedule.__wrapped__(40)))
