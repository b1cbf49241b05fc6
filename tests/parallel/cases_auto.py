"""exchange="auto": plans alike on all ranks, trains as one process does, and turns back."""

import contextlib
import dataclasses
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import engine_only, sizes
from tests.helpers.ranks import float64, require_error
from tfscale import Auto
from tfscale.plan.machines import Machine
from tfscale.testing import require_close, require_equal_ranks

BATCH, STEPS = 12, 40  # with `few_steps`: ten by layer, five of allreduce and of each plan
SLOW = Machine("slow links", 1e-6, 1e6, 1e9, 1e12, 1e12)


@contextlib.contextmanager
def few_steps():
    """Decide after fewer steps than are worth a decision."""
    with (
        mock.patch("tfscale.measure.auto._TIMED_STEPS", 3),
        mock.patch("tfscale.measure.layer_times.UNMEASURED_STEPS", 2),
        mock.patch("tfscale.measure.layer_times.MEASURED_STEPS", 3),
    ):
        yield


@contextlib.contextmanager
def slower(factor: float):
    """Give up plans that take so many times plain allreduce's time."""
    with mock.patch("tfscale.measure.auto._SLOWER", factor):
        yield


def build() -> keras.Model:
    """A wide layer that would rather send activations, and small ones."""
    layers = keras.layers
    inputs = keras.Input((96,))
    x = layers.Dense(64, activation="tanh", name="wide")(inputs)
    x = layers.Dense(8, activation="tanh", name="narrow")(x)
    return keras.Model(inputs, layers.Dense(3, name="top")(x), name="auto_model")


def samples(n: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.normal(size=(n, 96)), random.normal(size=(n, 3))


def fit(model: keras.Model, exchange, batch: int = BATCH, steps: int = STEPS) -> None:
    """Train on all ranks; the exchange is that of the first call."""
    x, y = samples(steps * batch)
    if not model.compiled:
        sgd = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(hvd.DistributedOptimizer(sgd, exchange=exchange), loss="mse")
    data = tfscale.data.GlobalBatches(x, y, batch_size=batch, shuffle=False)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with few_steps():
        model.fit(data, verbose=0, callbacks=[start])


def pair(rule) -> tuple[keras.Model, keras.Model]:
    """Return a new model, and an equal one that one process has trained."""
    keras.utils.set_random_seed(5)
    model, alone = build(), build()
    alone.set_weights(model.get_weights())
    alone.compile(rule, loss="mse")
    alone.fit(*samples(STEPS * BATCH), batch_size=BATCH, shuffle=False, verbose=0)
    return model, alone


def trained(exchange) -> keras.Model:
    with float64():
        model, alone = pair(keras.optimizers.SGD(0.05, momentum=0.9))
        fit(model, exchange)
    require_equal_ranks(model.trainable_variables)
    require_close(model.get_weights(), alone.get_weights())
    return model


def agreed(model: keras.Model):
    """Return the strategy, which must be the same on all ranks, explanation included."""
    strategy = model.optimizer.strategy
    assert getattr(strategy, "outcome", None) is not None, strategy
    every = tfscale.allgather_object((repr(strategy), strategy.outcome))
    assert all(rank == every[0] for rank in every), every
    return strategy


def gathering(strategy) -> list[str]:
    return [path for path, _ in strategy.layers]


@sizes(2, 3, timeout_s=240)
@engine_only("its messages are measured")
def case_measured_plans_train_as_one_process():
    strategy = agreed(trained("auto"))
    text = strategy.explain()
    assert "wide/kernel" in text and "narrow/bias" in text
    assert "allreduce takes" in text and "predicted" in text
    outcome = strategy.outcome
    assert min(outcome.predicted_s, outcome.measured_s, outcome.plain_measured_s) > 0


@sizes(2, timeout_s=240)
@engine_only("its messages are measured")
def case_a_known_machine_is_planned_for_at_once():
    """Slow links: the wide layer gathers activations, whatever is measured here."""
    with slower(1e9):
        model = trained(Auto(machine=SLOW))
    strategy = agreed(model)
    assert "wide" in gathering(strategy)
    assert "The plan is kept" in strategy.explain()


@sizes(2, 3, timeout_s=240)
@engine_only("its messages are measured")
def case_a_plan_that_is_slower_is_given_up():
    """Every plan counts as slower here: training continues with plain allreduce."""
    with slower(0.0):
        strategy = agreed(trained(Auto(machine=SLOW)))
        assert strategy.name == "plain allreduce" and not gathering(strategy)
        assert "Slower than planned, plain allreduce" in strategy.explain()
        kept = agreed(trained(Auto(machine=SLOW, replan=False)))
        assert gathering(kept) and "kept as replan=False" in kept.explain()


@sizes(2, timeout_s=240)
@engine_only("its messages are measured")
def case_another_batch_size_is_planned_again():
    model = build()
    for batch, planned in ((BATCH, BATCH), (BATCH + 2, BATCH), (4 * BATCH, 4 * BATCH)):
        fit(model, Auto(machine=SLOW), batch)
        assert f"{planned} samples per step" in agreed(model).explain()
    require_equal_ranks(model.trainable_variables)


@sizes(2, 3, timeout_s=120)
@engine_only("its messages are measured")
def case_ranks_that_plan_otherwise_are_an_error():
    """Every rank has links of its own, the last one so fast that it plans nothing."""
    is_last = tfscale.rank() == tfscale.size() - 1
    machine = dataclasses.replace(SLOW, bytes_per_s=1e12 if is_last else 1e6)
    train = lambda: fit(build(), Auto(machine=machine), steps=14)  # noqa: E731
    require_error(train, "Exchange must be the same on all ranks. Received: exchange=Auto(")
    # Without that comparison, as in a loop of one's own, the plans are compared.
    with mock.patch("tfscale.fit.agreement._exchange", return_value={}):
        require_error(train, "Plans must be the same on all ranks")


@sizes(2, timeout_s=120)
def case_steps_that_cannot_be_measured_are_not_planned():
    """Accumulated gradients, several steps in one call, nothing that is traced: plain allreduce."""
    for passes, options in (
        (2, {}),
        (1, {"steps_per_execution": 3}),
        (1, {"run_eagerly": True}),
    ):
        model, exchange = build(), Auto(machine=SLOW)
        sgd = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05), exchange=exchange, backward_passes_per_step=passes
        )
        model.compile(sgd, loss="mse", **options)
        fit(model, None, steps=14)
        assert isinstance(model.optimizer.strategy, Auto), model.optimizer.strategy
        require_equal_ranks(model.trainable_variables)


@sizes(2, timeout_s=240)
@engine_only("its messages are measured")
def case_a_loop_of_ones_own_calls_after_step():
    with float64(), few_steps(), slower(1e9):
        model, alone = pair(keras.optimizers.Adam(0.01))
        exchange = Auto(machine=SLOW)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), exchange=exchange)
        model.compile(optimizer, loss="mse")
        tfscale.prepare(model, batch_size=BATCH)
        assert optimizer.strategy.outcome is None

        def body(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        step, n_traced = tf.function(body), 1
        own = np.arange(STEPS * BATCH).reshape(STEPS, tfscale.size(), -1)[:, tfscale.rank()]
        x, y = samples(STEPS * BATCH)
        for places in own:
            step(tf.constant(x[places]), tf.constant(y[places]))
            if tfscale.after_step(optimizer):
                step, n_traced = tf.function(body), n_traced + 1
    assert n_traced >= 4 and "wide" in gathering(agreed(model))
    require_close(model.get_weights(), alone.get_weights())


@sizes(2, timeout_s=120)
@engine_only("its messages are measured")
def case_without_a_known_batch_dense_layers_send_gradients():
    model = build()
    x, y = samples(STEPS * 6)
    sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), exchange=Auto(machine=SLOW))
    model.compile(sgd, loss="mse")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with few_steps():
        model.fit(x, y, batch_size=6, verbose=0, callbacks=[start])
    assert not gathering(agreed(model))
