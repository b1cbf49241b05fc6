"""Corners in which gradients once went wrong without a word, each against what it should be."""

import copy

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import engine_only, sizes
from tests.helpers.equality import EmbeddingModel
from tests.helpers.ranks import StopAt, float64, require_error
from tfscale.callbacks import BroadcastGlobalVariablesCallback, Callback, ParameterAveraging
from tfscale.testing import inspect, require_close, require_equal_ranks, require_identical

BATCH, STEPS, START = 12, 4, [BroadcastGlobalVariablesCallback(0)]


def arrays(n: int = BATCH * STEPS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(n, 6)), random.normal(size=(n, 3))


def mlp() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh", name="lower"), layers.Dense(3, name="head")]
    )


def trained(optimizer, epochs=1, callbacks=(), **options) -> keras.Model:
    model = mlp()
    model.compile(optimizer, "mse", **options)
    data = tfscale.data.GlobalBatches(*arrays(), batch_size=BATCH, shuffle=False)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[*callbacks, Callback()])
    return model


@sizes(2, timeout_s=60)
def case_scaled_gradients_are_not_added_up():
    for inner in (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        keras.optimizers.SGD(0.1, loss_scale_factor=1024.0),
    ):
        strategy = tfscale.LocalSGD(2, 2, "allreduce", average="gradients")
        optimizer = hvd.DistributedOptimizer(inner, exchange=strategy)
        require_error(
            lambda optimizer=optimizer: trained(optimizer, callbacks=START),
            "average='gradients' with",
            "Use average='parameters'",
        )


@sizes(2, timeout_s=60)
def case_a_copy_forms_groups_of_its_own():
    strategy = tfscale.LocalSGD(2, 2, "allreduce")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=strategy)
    first = trained(optimizer, callbacks=START)
    for other in (copy.deepcopy(optimizer), optimizer.from_config(optimizer.get_config())):
        model = trained(other, callbacks=START)
        groups = other.bound.groups.ranks
        assert groups == [[0], [1]], groups
        require_equal_ranks(model.trainable_variables)  # the average, which fit leaves
        require_close(model.get_weights(), first.get_weights(), atol=1e-6)


@sizes(2, 3, timeout_s=120)
def case_local_layers_are_not_replicated():
    """Their gradients stay on the rank, as with plain allreduce."""
    with float64():
        found = []
        for exchange in ("allreduce", tfscale.Chunked(replicated_dense=1)):
            model = mlp()
            optimizer = tfscale.PartialDistributedOptimizer(
                keras.optimizers.SGD(0.1), local_layers=model.layers[0], exchange=exchange
            )
            model.compile(optimizer, "mse")
            data = tfscale.data.GlobalBatches(*arrays(), batch_size=BATCH, shuffle=False)
            start = BroadcastGlobalVariablesCallback(0, consistency_check=False)
            model.fit(data, verbose=0, callbacks=[start])
            found.append(model.get_weights())
        require_close(found[1], found[0])
        every = tfscale.allgather_object(found[1][0])
        assert not np.array_equal(every[0], every[1])


@sizes(2, timeout_s=120)
def case_a_local_gradient_that_is_not_finite_is_told_to_all():
    """Also where the last layer is replicated, whose gradient is not sent."""
    keras.utils.set_random_seed(3)
    inner = [keras.layers.Dense(8), keras.layers.LayerNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *inner])
    optimizer = tfscale.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1),
        local_layers=model.layers[0],
        exchange=tfscale.Chunked(replicated_dense=2),
        nonfinite="skip",
    )
    model.compile(optimizer, "mse")
    tfscale.prepare(model)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        if tfscale.rank() == 1:
            gradients[0] = gradients[0] * np.nan
        optimizer.apply(gradients, model.trainable_variables)

    before = model.get_weights()
    step(*(tf.constant(a[:4], "float32") for a in arrays()))
    assert optimizer.n_skipped_steps == 1
    require_identical(model.get_weights(), before)


@sizes(2, timeout_s=120)
def case_vectorised_layers_send_weight_gradients():
    """TimeDistributed over an unknown number of steps drops gradients of our own."""
    with float64():
        x, y = np.random.default_rng(2).normal(size=(2, 8, 5, 6))
        results = []
        for exchange in ("allreduce", tfscale.Chunked(replicated_dense=1), "partial"):
            keras.utils.set_random_seed(1)
            inner = keras.layers.Dense(6, "tanh")
            model = keras.Sequential(
                [keras.Input((None, 6)), keras.layers.TimeDistributed(inner), keras.layers.Dense(6)]
            )
            if exchange == "partial":
                exchange = tfscale.Sharded(dense="partial")
            sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
            model.compile(sgd, "mse")
            data = tfscale.data.GlobalBatches(x, y, batch_size=4, shuffle=False)
            model.fit(data, verbose=0, callbacks=[Callback()])
            require_equal_ranks(model.trainable_variables)
            results.append(model.get_weights())
            assert inspect.dense_route(inner) == "weights"
        for weights in results[1:]:
            require_close(weights, results[0])


@sizes(2, 3, timeout_s=60)
def case_sparse_gradients_of_any_length_in_eager_steps():
    """Enough rows for a dense sum on one rank, too few on another: all do the same."""
    table = keras.Variable(np.zeros((16, 2)), dtype="float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    every = [np.arange(4 if rank else 24) % 16 for rank in range(tfscale.size())]
    rows = every[tfscale.rank()]
    own = tf.IndexedSlices(tf.ones([len(rows), 2]), tf.constant(rows), tf.constant([16, 2]))
    optimizer.apply([own], [table])
    expected = np.bincount(np.concatenate(every), minlength=16)[:, np.newaxis] / -tfscale.size()
    np.testing.assert_allclose(table.numpy(), np.repeat(expected, 2, 1), rtol=1e-6)


@engine_only("it starts what is ready")
@sizes(2, timeout_s=60)
def case_embeddings_do_not_keep_other_gradients_waiting():
    listener = inspect.listen()
    keras.utils.set_random_seed(1)
    model = EmbeddingModel()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.random.default_rng(0).integers(0, 11, size=(BATCH, 6))
    model.fit(x, np.ones((BATCH, 3)), batch_size=4, verbose=0, callbacks=[Callback()])
    events = listener.take()
    listener.close()
    keys = {(int(e["plan"]), int(e["slot"])) for e in events[events["plan"] >= 0]}
    names = {key: inspect.name_of(*key) for key in keys}
    sparse = [key for key, name in names.items() if "embedding" in name]
    assert sparse, names
    others = keys - set(sparse)
    others = [slot for plan, slot in others if plan == sparse[0][0]]
    assert others and min(slot for _, slot in sparse) > max(others), names


@sizes(2, timeout_s=60)
def case_factors_of_numpy():
    value = tfscale.allreduce(tf.ones([2]), op=tfscale.Sum, prescale_factor=np.float32(0.5))
    np.testing.assert_allclose(value.numpy(), [1.0, 1.0])
    rows = tfscale.reducescatter(tf.ones([2]), op=tfscale.Sum, postscale_factor=np.float64(0.5))
    np.testing.assert_allclose(rows.numpy(), [1.0])


@sizes(2, timeout_s=60)
def case_complex_gradients_are_refused():
    weights = tf.Variable(tf.zeros([2], tf.complex64))
    with tfscale.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(tf.abs(weights - 1.0) ** 2)
    require_error(lambda: tape.gradient(loss, [weights]), "ConfigError", "dtype=complex64")


@sizes(2, timeout_s=60)
def case_sharded_parameters_are_keras_variables():
    weights = tf.Variable(tf.zeros([4]), name="own_weights")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=tfscale.Sharded())
    text = "parameters must be Keras variables if sharded. Received"
    require_error(lambda: optimizer.apply_gradients([(tf.ones([4]), weights)]), text)


@sizes(2, timeout_s=120)
def case_averaging_at_the_end_of_training_that_stops_early():
    averaging = ParameterAveraging("end")
    start = BroadcastGlobalVariablesCallback(0, consistency_check=False, non_trainable="local")
    callbacks = [start, averaging, StopAt(rank=tfscale.rank())]
    model = trained(keras.optimizers.SGD(0.1), epochs=5, callbacks=callbacks)
    assert averaging.n_averages == 1
    require_equal_ranks(model.trainable_variables)
    model.fit(*arrays(8), epochs=1, verbose=0, callbacks=callbacks[:2])
    assert averaging.n_averages == 2
