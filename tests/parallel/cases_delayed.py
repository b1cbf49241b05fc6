"""Dense layers updated when they are read next train exactly as one process does."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import dtype_policy, require_equal_ranks
from tests.helpers.spawn import sizes
from tests.parallel.cases_chunked import mlp
from tests.parallel.cases_equality import OPTIMIZERS, check, float64
from tests.parallel.delayed_model import Pair, alone, delayed, due

STEPS = 10


@sizes(2, 3, 4, timeout_s=400)
def case_delayed_updates_equal_one_process():
    """With uneven batches; what the last step left is made on reading."""
    ways = itertools.product((1, 2, 9), (1, 2, 3))
    with float64():
        kinds = [(mlp(), OPTIMIZERS["momentum"]), (mlp(use_bias=False), OPTIMIZERS["adam"])]
        expected = [alone(*kind, STEPS) for kind in kinds]
        for number, (first, n_layers) in enumerate(ways):
            pair = Pair(*kinds[number % 2], delayed(first, n_layers), has_twin=False)
            pair.step(STEPS)
            assert due(pair.optimizer) == [True] * n_layers
            pair.check(f"k={first} f={n_layers}", expected[number % 2])
            require_equal_ranks([*pair.optimizer.variables, *pair.model.variables])


def scheduled() -> keras.optimizers.Optimizer:
    """The rate is another one in each step; biases do not decay."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.7)
    rule = keras.optimizers.AdamW(rate, weight_decay=0.3, clipnorm=0.4)
    rule.exclude_from_weight_decay(var_names=["bias"])
    return rule


@sizes(2, timeout_s=240)
def case_rates_decay_and_constraints():
    def limited() -> keras.Model:
        limit = keras.constraints.MaxNorm(0.5)
        layers = [keras.layers.Dense(7, kernel_constraint=limit), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *layers])

    with float64():
        pair = Pair(mlp(), scheduled)
        pair.step(5)
        pair.check("schedule")
        pair = Pair(limited, OPTIMIZERS["momentum"])
        for rate in (0.01, 0.002, 0.02):
            pair.step()
            for model in (pair.model, pair.twin):
                model.optimizer.learning_rate = rate
        pair.check("rates")
        # Switched off: everything is updated in its step.
        pair = Pair(mlp(), lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1))
        pair.step(3)
        assert due(pair.optimizer) == []
        pair.check("global_clipnorm")
    # In `fit`; no layer is left for the chunks.
    check(mlp(), OPTIMIZERS["adam"], exchange=delayed(1, 4), steps_per_execution=5)


class Doubling(keras.Model):
    """Changes gradients between back-propagation and update."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply([2 * g for g in gradients], self.trainable_variables)
        return {"loss": loss}


def doubling() -> keras.Model:
    """Return a model with changed gradients."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    return Doubling(inputs, keras.layers.Dense(3)(hidden))


def twice() -> keras.Model:
    """Return a model that uses a layer twice."""
    inputs = keras.Input((6,))
    layer = keras.layers.Dense(6, activation="tanh")
    return keras.Model(inputs, keras.layers.Dense(3)(layer(layer(inputs))))


@sizes(2, timeout_s=120)
def case_changed_gradients_are_applied_at_once():
    with float64():
        for build, expected in ((doubling, [False, False]), (twice, [False, True])):
            pair = Pair(build, OPTIMIZERS["adam"])
            pair.step(3)
            assert due(pair.optimizer) == expected
            pair.check(build.__name__)


@sizes(2, timeout_s=120)
def case_half_precision():
    """Layers in bfloat16 with weights in float32."""

    def trained(is_delayed: bool) -> list[np.ndarray]:
        pair = Pair(
            mlp(),
            OPTIMIZERS["momentum"],
            tfscale.Chunked(
                first_chunk_layers=1, replicated_dense=2, delay_dense_update=is_delayed
            ),
            has_twin=False,
        )
        pair.step(3)
        assert due(pair.optimizer) == [True, True] * is_delayed
        return pair.model.get_weights()

    with dtype_policy("mixed_bfloat16"):
        found = [trained(is_delayed) for is_delayed in (False, True)]
    for at_once, later in zip(*found, strict=True):
        np.testing.assert_allclose(later, at_once, rtol=1e-5, atol=1e-6)
