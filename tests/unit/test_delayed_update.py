"""Updates of dense layers that are made when somebody reads: when they are, and what they need."""

import logging
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale.comm.compression import Compression
from tfscale.exchange.base import GradientOptions
from tfscale.exchange.factors import Factors, factors_of, note_factors, product
from tfscale.parameters import futures
from tfscale.update.delayed_dense import DelayedDense
from tfscale.update.delayed_layer import DelayedLayer
from tfscale.update.rules import why_not_later

rules = keras.optimizers
A = np.arange(12, dtype="float32").reshape(4, 3) / 10
E = np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2)


class FourRanks:
    """Stands in for a process set."""

    def size(self) -> int:
        return 4


def model_of(*layers: keras.layers.Layer) -> keras.Model:
    """Return a model whose first two dense layers exchange activations and errors."""
    model = keras.Sequential([keras.Input((3,)), *layers])
    strategy = tfscale.Chunked(replicated_dense=len(layers), delay_dense_update=True)
    strategy.wire(model, GradientOptions(compression=Compression.none), FourRanks())
    return model


@pytest.mark.parametrize(
    "rule, reason",
    [
        (rules.Adam(), ""),
        (rules.SGD(0.1, momentum=0.9, weight_decay=0.1, clipnorm=1.0), ""),
        (tfscale.optimizers.LARS(0.1), ""),
        (rules.LossScaleOptimizer(rules.SGD()), "loss scaling"),
        (rules.SGD(loss_scale_factor=8.0), "loss scaling"),
        (rules.SGD(gradient_accumulation_steps=2), "added up"),
        (rules.SGD(global_clipnorm=1.0), "global norm"),
        (rules.SGD(use_ema=True), "moving average"),
        (rules.Nadam(), "not known whether Nadam"),
    ],
)
def test_rules_that_cannot_wait(rule, reason):
    assert why_not_later(rule) == reason or (reason and reason in why_not_later(rule))


@pytest.mark.parametrize("rule", [rules.SGD(0.1, global_clipnorm=1.0), rules.Adam()])
def test_one_line_says_how_layers_are_updated(rule, caplog):
    model, delayed = model_of(keras.layers.Dense(2, name="head")), DelayedDense()
    model.compile(rule)
    caplog.set_level(logging.INFO, "tfscale")
    found = [delayed.attach(model, rule) for _ in range(2)]
    is_off = rule.global_clipnorm is not None
    assert found == [not is_off, False]
    (line,) = caplog.messages
    assert ("at once: clipping by the global norm" if is_off else "head is updated when") in line
    kernel = model.layers[0].kernel
    assert isinstance(kernel, futures.Awaited) is not is_off


def test_a_model_that_is_not_built_is_updated_at_once(caplog):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd")
    caplog.set_level(logging.INFO, "tfscale")
    assert not DelayedDense().attach(model, model.optimizer)
    assert "not built yet" in caplog.text


def test_a_gradient_is_known_until_it_is_changed():
    @tf.function(autograph=False)
    def look(a, e):
        gradient = product(Factors(a, e))
        note_factors(gradient, Factors(a, e))
        cast = tf.cast(tf.identity(gradient), tf.float64)
        found = factors_of(cast)
        assert found is not None and found.activations is a and found.errors is e
        for changed in (2 * gradient, tf.add_n([gradient, gradient]), tf.cast(cast, tf.float32)):
            assert factors_of(changed) is None
        inside: list[Factors | None] = []
        tf.cond(a[0, 0] > -1, lambda: inside.append(factors_of(gradient)), lambda: None)
        assert inside == [None]
        return found.activations

    np.testing.assert_array_equal(look(tf.constant(A), tf.constant(E)), A)
    assert factors_of(tf.constant(A)) is None and factors_of(None) is None


def trained(is_delayed: bool, rule: keras.optimizers.Optimizer) -> list[np.ndarray]:
    """Return weights and state after three steps with other rates."""
    layer = keras.layers.Dense(2, kernel_initializer="ones")
    layer.build((None, 3))
    rule.build(layer.trainable_variables)
    delayed = DelayedLayer(layer, rule)
    if is_delayed:
        futures.make_futures(delayed.waiting, wait=delayed.flush)

    @tf.function
    def step(a, e):
        factors = [Factors(a, e), Factors(None, e)]
        if not is_delayed:
            rule.apply([product(f) for f in factors], layer.trainable_variables)
            return
        delayed.flush()
        delayed.keep(factors)
        rule.iterations.assign_add(1)  # of the layers that are updated at once

    for number in range(3):
        rule.learning_rate = 0.1 / (number + 1)
        step(tf.constant(A + number), tf.constant(E))
    rule.learning_rate = 7.0  # comes too late
    return [v.numpy() for v in [*layer.variables, *rule.variables]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: rules.Adam(0.1),
        lambda: rules.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
        lambda: rules.Ftrl(0.1),
        lambda: rules.Lamb(0.1),
        lambda: tfscale.optimizers.LARS(0.1),
    ],
)
def test_an_update_is_that_of_its_step(make):
    at_once, later = trained(False, make()), trained(True, make())
    for expected, found in zip(at_once, later, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def read_by_threads(variable: keras.Variable, n_threads: int) -> list[np.ndarray]:
    """Return what threads find that read at the same time."""
    found: list[np.ndarray] = []
    read = lambda: found.append(variable.numpy())  # noqa: E731
    threads = [threading.Thread(target=read) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_an_update_is_made_once():
    """However many threads read, and however many variables of the layer."""
    rule, layer = rules.SGD(1.0, momentum=0.5), keras.layers.Dense(2)
    layer.build((None, 3))
    rule.build(layer.trainable_variables)
    before = layer.kernel.numpy()
    delayed = DelayedLayer(layer, rule)
    futures.make_futures(delayed.waiting, wait=delayed.flush)
    assert [v.name for v in delayed.waiting] == [
        "kernel",
        "bias",
        *(v.name for v in rule.variables if "momentum" in v.name),
    ]
    keep = tf.function(lambda: delayed.keep([Factors(A, E), Factors(None, E)]))
    for number in range(1, 4):
        keep()
        found = read_by_threads(layer.kernel, 8)
        expected = before - sum(2 - 0.5**i for i in range(number)) * (A.T @ E)
        np.testing.assert_allclose(found, [expected] * 8, rtol=1e-5, atol=1e-6)


def test_an_update_is_no_part_of_a_gradient():
    """Nor do the scopes of the reader reach into it."""
    rule, layer = rules.SGD(1.0), keras.layers.Dense(2, use_bias=False)
    layer.build((None, 3))
    rule.build(layer.trainable_variables)
    delayed = DelayedLayer(layer, rule)
    futures.make_futures(delayed.waiting, wait=delayed.flush)
    delayed.keep([Factors(tf.constant(A), tf.constant(E))])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(layer(tf.ones([1, 3]))))
    gradient = tape.gradient(loss, layer.kernel.value)
    expected = 2 * np.ones((3, 1)) @ np.ones((1, 3)) @ layer.kernel.numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
