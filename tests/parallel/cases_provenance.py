"""Gradients of dense layers that exchange activations: what the layers' own calls have made."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64
from tests.parallel.sharded_dense_model import STRATEGIES, compiled, routes
from tfscale.config import PlanError
from tfscale.testing import require_close

STEPS = 3


class Decoder(keras.layers.Layer):
    """Multiplies by the transposed kernel of a layer that it holds."""

    def __init__(self, dense: keras.layers.Dense):
        super().__init__()
        self.dense = dense
        self.built = True

    def call(self, inputs):
        return inputs @ keras.ops.transpose(self.dense.kernel)


class Tied(keras.Model):
    """Reads the kernel of one of its layers."""

    def __init__(self):
        super().__init__()
        self.enc, self.last = keras.layers.Dense(6, use_bias=False), keras.layers.Dense(3)
        self(np.zeros((2, 6)))

    def call(self, inputs, training=None):
        hidden = self.enc(inputs, training=training) @ keras.ops.transpose(self.enc.kernel)
        return self.last(hidden, training=training)


def autoencoder() -> keras.Model:
    inputs, dense = keras.Input((6,)), keras.layers.Dense(6)
    return keras.Model(inputs, keras.layers.Dense(3)(Decoder(dense)(dense(inputs))))


def stepping(change: Callable, term: float = 0.0) -> Callable[[], keras.Model]:
    """Return a builder of a model whose train step changes gradients."""

    class Stepping(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                decay = [tf.reduce_sum(tf.square(v.value)) for v in self.trainable_variables]
                loss += tf.cast(term, loss.dtype) * tf.add_n(decay) if term else 0.0
            gradients = tape.gradient(loss, [v.value for v in self.trainable_variables])
            self.optimizer.apply(change(gradients), self.trainable_variables)
            return {"loss": loss}

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        first = keras.layers.Dense(6, activation="tanh")
        hidden = first(first(inputs))  # the sum of two calls
        return Stepping(inputs, keras.layers.Dense(3)(hidden))

    return build


def batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(tfscale.rank())
    return random.normal(size=(4, 6)) * (1 + tfscale.rank()), random.normal(size=(4, 3))


def trained(build: Callable[[], keras.Model], strategy, rule=None, **options) -> list[np.ndarray]:
    with float64():
        model = compiled(build, strategy, rule, **options)
        tfscale.prepare(model)
        if strategy != "allreduce":
            assert routes(model) != ["weights"] * 2
        for _ in range(STEPS):
            model.train_on_batch(*batch())
        return model.get_weights()


@sizes(2, timeout_s=120)
def case_kernels_that_are_read_outside_of_their_layer_are_refused():
    for build in (Tied, autoencoder):
        for strategy in STRATEGIES:
            with pytest.raises(
                PlanError, match=r"kernel exchanges activations: .* Received: one to which other"
            ):
                trained(build, strategy)


def clipped(gradients):
    """Clip by the norm of what this rank sees."""
    return tf.clip_by_global_norm(gradients, 0.01)[0]


@sizes(2, timeout_s=120)
def case_what_changes_gradients_in_a_step_is_refused():
    """Also penalties on weights: a sum of all ranks has each rank's term, a whole batch has one."""
    for strategy in STRATEGIES:
        for build, text in (
            (stepping(clipped), "global_clipnorm instead of in the train step"),
            (stepping(list, 0.25), "through its layer's calls alone"),
        ):
            with pytest.raises(PlanError, match=text):
                trained(build, strategy)


def halved(gradients):
    """Multiply by a constant, through what does not change values."""
    factor = lambda x: tf.identity(x) * tf.constant(0.5, x.dtype)  # noqa: E731
    return [
        tf.IndexedSlices(factor(g.values), g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else factor(g)
        for g in gradients
    ]


@sizes(2, timeout_s=120)
def case_constants_and_the_optimizer_may_change_gradients():
    """Constant factors; the optimizer's clipping; sums in place of means."""
    for options, clip in (({}, None), ({}, 0.05), ({"op": hvd.Sum}, None)):
        whole, *others = (
            trained(stepping(halved), s, keras.optimizers.SGD(0.1, global_clipnorm=clip), **options)
            for s in ("allreduce", *STRATEGIES)
        )
        for found in others:
            require_close(found, whole, atol=1e-12)


@sizes(2, timeout_s=120)
def case_another_optimizer_gets_the_layers_back():
    for strategy in STRATEGIES:
        model = compiled(stepping(list), strategy)
        tfscale.prepare(model)
        model.train_on_batch(*batch())
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        tfscale.prepare(model)
        assert routes(model) == ["weights"] * 2
        if tfscale.rank() == 0:
            model.train_on_batch(*batch())  # alone: nothing is exchanged
