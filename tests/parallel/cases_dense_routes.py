"""Dense layers of sharded models: those that exchange activations, and the values they send."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import engine_only, sizes
from tests.helpers.equality import BATCH, OPTIMIZERS, mlp
from tests.helpers.equality import check as check_whole
from tests.helpers.ranks import float64
from tests.parallel.sharded_dense_model import DENSE, compiled, routes
from tests.parallel.sharded_model import check
from tfscale.config import PlanError
from tfscale.testing import inspect, require_close, require_identical


class Transposed(keras.layers.Layer):
    def __init__(self, other: keras.layers.Dense):
        super().__init__()
        self.kernel = other.kernel

    def call(self, inputs):
        return inputs @ keras.ops.transpose(self.kernel)


@sizes(2, timeout_s=120)
def case_layers_that_must_send_weights():
    class OwnDense(keras.layers.Dense):
        pass

    def build() -> keras.Model:
        dense = keras.layers.Dense
        shared = dense(4)
        shared.build((None, 4))
        layers = [OwnDense(4), dense(4, kernel_regularizer="l2")]
        layers += [dense(4, kernel_constraint="non_neg"), dense(1), dense(4)]
        return keras.Sequential([keras.Input((4,)), *layers, shared, Transposed(shared), dense(4)])

    model = compiled(build, tfscale.Sharded(dense="partial"))
    tfscale.prepare(model)
    assert routes(model) == ["weights"] * 3 + ["partial", "weights", "weights", "partial"]


@sizes(2, 3, timeout_s=120)
def case_auto_follows_the_batch_size():
    """Large kernels go by rows where the batch is small; the batch size comes with the data."""

    def build() -> keras.Model:
        layers = keras.layers
        inputs = keras.Input((512,))
        hidden = layers.Dense(256, name="large")(inputs)
        hidden = layers.Dense(64, name="rows")(layers.Reshape((16, 16))(hidden))
        hidden = layers.Dense(2, name="small")(layers.Flatten()(hidden))
        return keras.Model(inputs, hidden)

    for batch, expected in ((12, "partial"), (12_000, "weights")):
        model = compiled(build, tfscale.Sharded())
        tfscale.prepare(model, batch_size=batch)
        assert routes(model) == [expected, "weights", "weights"], (batch, routes(model))
    # Prepared before the data are known, then given to fit.
    model = compiled(build, tfscale.Sharded(), keras.optimizers.Adam(0.01))
    tfscale.prepare(model)
    assert routes(model) == ["weights"] * 3
    x, y = np.ones((24, 512), "float32"), np.ones((24, 2), "float32")
    model.train_on_batch(x[:4], y[:4])
    before = model.optimizer.full_state()
    data = tfscale.data.GlobalBatches(x, y, batch_size=12, shuffle=False)
    model.fit(data, verbose=0, epochs=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
    assert routes(model) == ["partial", "weights", "weights"]
    require_identical(before, model.optimizer.full_state())
    model.fit(data, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
    tfscale.prepare(model)  # outside of fit nothing changes back
    assert routes(model) == ["partial", "weights", "weights"]


@engine_only("its events are looked at")
@sizes(2, 3, 4, timeout_s=120)
def case_bytes_and_number_of_collectives():
    """Per layer n_in of its samples to each rank and n_out of all; biases send no gradients."""
    layers = ((6, 12, 1), (3, 5, 4), (20, 8, 1), (8, 3, 1))  # inputs, outputs, positions
    n_local = BATCH // tfscale.size()
    for route in DENSE:
        with float64():
            model = compiled(mlp(), tfscale.Sharded(dense=route))
            tfscale.prepare(model)
            x, y = np.ones((n_local, 6)), np.ones((n_local, 3))
            model.train_on_batch(x, y)
            model.get_weights()  # waits for the parameters
            inspect.take_collectives()
            model.evaluate(x, y, verbose=0)
            model.predict(x, verbose=0)
            assert not inspect.take_collectives()
            model.train_on_batch(x, y)
            model.get_weights()
            events = [e for e in inspect.take_collectives() if e.slot >= 0]
        bytes_of = {word: [] for word in ("activations", "output", "gradients", "parameters")}
        for event in events:
            words = event.name.split(" ")
            next(bytes_of[word] for word in bytes_of if word in words).append(event.bytes)
        chosen = [x for x in layers if route == "replicated" or x[0] >= tfscale.size()]
        rest = [x for x in layers if x not in chosen]
        assert sorted(bytes_of["activations"]) == sorted(8 * n * p * n_local for n, _, p in chosen)
        assert sorted(bytes_of["output"]) == sorted(8 * n * p * n_local for _, n, p in chosen)
        assert sum(bytes_of["gradients"]) == 8 * sum(n * m + m for n, m, _ in rest)
        assert len(bytes_of["gradients"]) == len(rest)


def nested(is_function: bool) -> Callable[[], keras.Model]:
    """Return a builder of a model that calls its layers in a function, or in a loop, of its own."""

    class Nested(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(6), keras.layers.Dense(3)
            self.run = tf.function(self._first) if is_function else self._in_a_loop

        def _first(self, x):
            return self.first(x, training=True)

        def _in_a_loop(self, x):
            count = lambda i, x: i < 2  # noqa: E731
            return tf.while_loop(count, lambda i, x: (i + 1, self._first(x)), (0, x))[1]

        def call(self, inputs, training=None):
            hidden = self.run(inputs) if training else self.first(inputs)
            return self.last(hidden, training=training)

    def build() -> keras.Model:
        model = Nested()
        model(np.zeros((2, 6)))
        return model

    return build


@sizes(2, timeout_s=180)
def case_layers_in_loops_send_weights():
    """And in functions that the step calls they are refused, on all ranks."""
    for route in DENSE:
        check(nested(is_function=False), OPTIMIZERS["adam"], tfscale.Sharded(dense=route))
        model = compiled(nested(is_function=True), tfscale.Sharded(dense=route))
        tfscale.prepare(model)
        with pytest.raises(PlanError, match="where its gradient is applied"):
            model.train_on_batch(np.ones((4, 6), "float32"), np.ones((4, 3), "float32"))
    check_whole(nested(is_function=False), OPTIMIZERS["adam"], tfscale.Chunked(replicated_dense=2))


@sizes(2, timeout_s=120)
def case_local_layers_and_unprepared_models():
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), keras.layers.Dense(3)])

    model = compiled(build, tfscale.Sharded(dense="partial"))
    with pytest.raises(PlanError, match="needs a prepared model"):
        model.train_on_batch(np.ones((4, 6), "float32"), np.ones((4, 3), "float32"))
    for variable in model.layers[0].trainable_variables:
        model.optimizer.register_local_var(variable)
    tfscale.prepare(model)
    assert routes(model) == ["weights", "partial"]


@sizes(2, 3, timeout_s=120)
def case_models_that_are_built_by_their_first_batch():
    x, y = np.random.default_rng(2).normal(size=(2, 24, 6))
    start, weights = hvd.callbacks.BroadcastGlobalVariablesCallback(0), []
    dense, data = keras.layers.Dense, tfscale.data.GlobalBatches(x, y, batch_size=12, shuffle=False)
    for strategy, route in (
        ("allreduce", "weights"),
        (tfscale.Sharded(dense="partial"), "partial"),
    ):
        with float64():
            model = compiled(lambda: keras.Sequential([dense(6), dense(6)]), strategy)
            model.fit(data, epochs=2, verbose=0, callbacks=[start])
            assert routes(model) == [route] * 2
            weights.append(model.get_weights())
    require_close(*weights, atol=1e-12)
