"""Models and optimizers, and training that must equal one process: float64, 1e-10."""

import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import float64
from tfscale.testing import require_identical

BATCH, STEPS, TOLERANCE = 24, 10, 1e-10


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "plain momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
}


# Norms of whole variables, computed by each rank.
LAYERWISE: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "lars": lambda: tfscale.LARS(0.1, trust_coefficient=0.05, weight_decay=0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
}


def dense_model() -> keras.Model:
    inputs = keras.Input((6,))
    left = keras.layers.Dense(16, activation="tanh")(inputs)
    right = keras.layers.Dense(16, activation="relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.add([left, right])))


def conv_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.MaxPooling2D(),
            layers.SeparableConv2D(5, 2, activation="tanh"),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


class EmbeddingModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(11, 4)
        self.lstm = keras.layers.LSTM(5)
        self.head = keras.layers.Dense(3)

    def call(self, inputs):
        return self.head(self.lstm(self.embedding(inputs)))


def inputs_of(build: Callable[[], keras.Model]) -> np.ndarray:
    random = np.random.default_rng(7)
    if build is EmbeddingModel:
        return random.integers(0, 11, size=(BATCH * STEPS, 6))
    shape = (8, 8, 2) if build is conv_model else (6,)
    return random.normal(size=(BATCH * STEPS, *shape))


def densify(optimizer) -> None:
    """Hand dense gradients on: Keras's nonlinear rules are wrong for repeated sparse indices."""
    apply = optimizer.apply
    optimizer.apply = lambda grads, variables=None: apply(
        [tf.convert_to_tensor(g) for g in grads], variables
    )


def new_model(build) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = build()
    model(inputs_of(build)[:2])
    return model


def targets() -> np.ndarray:
    return np.random.default_rng(8).normal(size=(BATCH * STEPS, 3))


@functools.cache
def alone(build, make_optimizer, **options) -> list[np.ndarray]:
    """Train by plain Keras on the batches in order; return all variables, the optimizer's last.

    Kept: many cases compare with the same.
    """
    x, y, model, optimizer = inputs_of(build), targets(), new_model(build), make_optimizer()
    densify(optimizer)
    model.compile(optimizer=optimizer, loss="mse", **options)
    for i in range(0, len(x), BATCH):
        model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH])
    optimizer.finalize_variable_values(model.trainable_weights)
    return [v.numpy() for v in [*model.variables, *optimizer.variables]]


def check(
    build, make_optimizer, exchange="allreduce", local_build=None, n_runs=1, **options
) -> None:
    """Train with and without tfscale; compare weights and the optimizer's complete state.

    Ranks must agree bit by bit, and so must several runs.
    """
    with float64():
        expected, runs = alone(build, make_optimizer, **options), []
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        for _ in range(n_runs):
            model = new_model(local_build or build)
            optimizer = hvd.DistributedOptimizer(make_optimizer(), exchange=exchange)
            model.compile(optimizer=optimizer, loss="mse", **options)
            arrays = inputs_of(build), targets()
            batches = tfscale.data.GlobalBatches(*arrays, batch_size=BATCH, shuffle=False)
            model.fit(batches, verbose=0, callbacks=[start])
            runs.append([*(v.numpy() for v in model.variables), *optimizer.full_state()])
    require_equal(runs[0], expected)
    for again in runs[1:]:
        require_identical(again, runs[0])


def require_equal(ours, alone) -> None:
    """Values are those of one process up to rounding, and equal bit by bit on all ranks."""
    for i, (mine, single) in enumerate(zip(ours, alone, strict=True)):
        atol = TOLERANCE if np.issubdtype(mine.dtype, np.floating) else 0
        np.testing.assert_allclose(mine, single, rtol=0, atol=atol, err_msg=f"variable {i}")
    for theirs in tfscale.allgather_object(ours):
        require_identical(theirs, ours)


@functools.cache
def mlp(use_bias: bool = True):
    """Return a builder of four dense layers, the second of which sees inputs of rank 3."""

    def build() -> keras.Model:
        layers = keras.layers
        inputs = keras.Input((6,))
        hidden = layers.Dense(12, activation="tanh", use_bias=use_bias)(inputs)
        hidden = layers.Dense(5, activation="relu")(layers.Reshape((4, 3))(hidden))
        hidden = layers.Dense(8, use_bias=use_bias)(layers.Flatten()(hidden))
        return keras.Model(inputs, layers.Dense(3)(hidden))

    return build


def norm_model(layer: Callable[[], keras.layers.Layer]) -> Callable[[], keras.Model]:

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        hidden = layer()(keras.layers.Dense(8)(inputs))
        pictures = keras.layers.Reshape((2, 2, 2))(keras.activations.tanh(hidden))
        pictures = layer()(keras.layers.Conv2D(3, 2, padding="same")(pictures))
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(pictures)))

    return build


class GhostBatchNormalization(keras.layers.BatchNormalization):
    """Normalises each of `n_parts` parts of a batch on its own, as ranks with a part each do."""

    def __init__(self, n_parts: int):
        super().__init__()
        self.n_parts = n_parts

    def call(self, inputs, training=None, mask=None):
        if not training:
            return super().call(inputs, training=training, mask=mask)
        parts = keras.ops.split(inputs, self.n_parts)
        before = [keras.ops.copy(v) for v in (self.moving_mean, self.moving_variance)]
        outputs, means, variances = [], [], []
        for part in parts:
            outputs.append(super().call(part, training=True, mask=mask))
            means.append(keras.ops.copy(self.moving_mean))
            variances.append(keras.ops.copy(self.moving_variance))
            self.moving_mean.assign(before[0])
            self.moving_variance.assign(before[1])
        self.moving_mean.assign(sum(means) / self.n_parts)
        self.moving_variance.assign(sum(variances) / self.n_parts)
        return keras.ops.concatenate(outputs)
