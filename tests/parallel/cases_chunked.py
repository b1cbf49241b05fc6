"""Chunks and replicated layers equal one process, evaluated and saved between two steps."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import require_close, shared_folder
from tests.helpers.spawn import engine_only, sizes
from tests.parallel.cases_equality import (
    BATCH,
    OPTIMIZERS,
    check,
    conv_model,
    float64,
    require_equal,
)
from tfscale.comm import runtime
from tfscale.comm.events import Listener
from tfscale.config import PlanError


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


@sizes(2, 3, 4, timeout_s=240)
def case_chunks_equal_one_process():
    for first in (1, 3):
        check(mlp(), OPTIMIZERS["momentum"], exchange=tfscale.Chunked(first_chunk_layers=first))
    for chunks in (1, 3, "per_layer"):
        check(
            mlp(),
            OPTIMIZERS["adam"],
            exchange=tfscale.Chunked(first_chunk_layers=2, chunks=chunks, overlap=False),
        )


@sizes(2, 3, 4, timeout_s=500)
def case_replicated_dense_equals_one_process():
    for number, (first, n_replicated) in enumerate([(1, 1), (2, 1), (1, 2), (1, 3)]):
        exchange = tfscale.Chunked(first_chunk_layers=first, replicated_dense=n_replicated)
        rule = OPTIMIZERS["adam" if number % 2 else "momentum"]
        check(mlp(use_bias=number % 3 > 0), rule, exchange=exchange)
    check(mlp(use_bias=False), OPTIMIZERS["adam"], exchange=tfscale.Chunked(replicated_dense=4))
    clipped = lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1)  # noqa: E731
    check(mlp(), clipped, exchange=tfscale.Chunked(replicated_dense=2))


@engine_only("its events are looked at")
@sizes(2, 3, timeout_s=120)
def case_the_first_chunk_is_measured():
    """Ten steps by layer, then two chunks with the same boundary on all ranks."""
    strategy = tfscale.Chunked(first_chunk_layers="auto")
    with float64():
        keras.utils.set_random_seed(1)
        model = mlp()()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=strategy)
        model.compile(optimizer=optimizer, loss="mse")
        x, y = np.ones((14 * BATCH, 6)), np.ones((14 * BATCH, 3))
        data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH)
        listener = Listener()
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(data, verbose=0, callbacks=[start])
        events = listener.take()
    chosen = model.optimizer.strategy.first_chunk_layers
    assert chosen in (1, 2, 3)
    assert set(tfscale.allgather_object(chosen)) == {chosen}
    n_alone = 2 * 6  # messages of two sizes that are sent alone, once to trace and five times
    n_traced = sum((events["plan"] >= 0) & (events["slot"] >= 0))
    assert n_traced == 10 * 4 + n_alone + 4 * 2


@sizes(2, timeout_s=120)
def case_layers_after_convolutions():
    check(conv_model, OPTIMIZERS["momentum"], exchange=tfscale.Chunked(replicated_dense=1))


@engine_only("its events are looked at")
@sizes(2, 3, timeout_s=120)
def case_bytes_and_number_of_collectives():
    """2 f gathers of activations and errors, one allreduce per chunk, nothing in evaluation."""
    with float64():
        keras.utils.set_random_seed(1)
        model = mlp()()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1),
            exchange=tfscale.Chunked(first_chunk_layers=1, replicated_dense=2),
        )
        model.compile(optimizer=optimizer, loss="mse")
        tfscale.prepare(model)
        n_local = BATCH // runtime.size()
        x, y = np.ones((n_local, 6)), np.ones((n_local, 3))
        model.train_on_batch(x, y)
        runtime.backend().take_events()
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        assert not runtime.backend().take_events()
        model.train_on_batch(x, y)
        events = [e for e in runtime.backend().take_events() if e.slot >= 0]
    assert len(events) == 2 * 2 + 2
    rows = (6 + 12) * n_local + (3 + 5) * 4 * n_local
    rest = 20 * 8 + 8 + 8 * 3 + 3
    assert sum(e.bytes for e in events) == 8 * (rows + rest)


@sizes(2, timeout_s=120)
def case_a_layer_used_with_and_without_training_is_refused():
    class Mixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs, training=None):
            return self.dense(inputs, training=training) + self.dense(inputs, training=False)

    model = Mixed()
    model(np.ones((2, 4)))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), exchange=tfscale.Chunked(replicated_dense=1)
    )
    model.compile(optimizer=optimizer, loss="mse")
    for _ in range(2):
        try:
            model.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
        except PlanError as error:
            # Not prepared at first, then prepared and refused for its two uses.
            assert "tfscale.prepare(model)" in str(error) or "training=True" in str(error), error
            tfscale.prepare(model)
        else:
            raise AssertionError("no error")


N_BEFORE, N_AFTER = 3, 3


def samples(n_steps):
    random = np.random.default_rng(5)
    return random.normal(size=(n_steps, BATCH, 6)), random.normal(size=(n_steps, BATCH, 3))


def compiled(optimizer):
    keras.utils.set_random_seed(3)
    model = mlp()()
    model.compile(optimizer, loss="mse")
    if optimizer.__class__ is not type(optimizer):  # a proxy: distributed
        tfscale.prepare(model)
    return model


def distributed(make):
    exchange = tfscale.Chunked(first_chunk_layers=1, replicated_dense=2)
    return compiled(tfscale.DistributedOptimizer(make(), exchange=exchange))


def run(model, steps, parts=1, part=0):
    """Train on one's part of global batches number `steps`."""
    x, y = samples(N_BEFORE + N_AFTER)
    own = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    for step in steps:
        model.train_on_batch(x[step][own], y[step][own])


def values_of(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def look_at(model):
    """Return actions of users between two steps: evaluate, predict, read."""
    (x,), (y,) = samples(1)
    traced = tf.function(lambda: tf.add_n([tf.reduce_sum(v.value) for v in model.weights]))
    loss = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return [np.asarray(loss), model.predict(x, verbose=0), traced().numpy(), *model.get_weights()]


def saved_and_restored(model):
    """Save on rank 0; return a new model, restored on all ranks."""
    with shared_folder() as folder:
        if tfscale.rank() == 0:
            model.save(folder / "model.keras")
        tfscale.barrier()
        whole = tfscale.load_model(folder / "model.keras", exchange=model.optimizer.strategy)
        tfscale.barrier()
        return tfscale.prepare(whole)


@engine_only("its events are looked at")
@sizes(2, 3, timeout_s=240)
def case_evaluation_and_checkpoints_between_steps():
    """In float64 all that is read, and all later training, is what one process has."""
    n, rank = tfscale.size(), tfscale.rank()
    before, after = range(N_BEFORE), range(N_BEFORE, N_BEFORE + N_AFTER)
    with float64():
        for name in ("momentum", "adam"):
            make = OPTIMIZERS[name]
            ours, alone = distributed(make), compiled(make())
            run(ours, before, n, rank)
            run(alone, before)
            require_close(look_at(ours), look_at(alone))
            restored = saved_and_restored(ours)
            run(alone, after)
            for model in (ours, restored):
                runtime.backend().take_events()
                run(model, after, n, rank)
                sent = [e for e in runtime.backend().take_events() if e.plan >= 0 and e.slot >= 0]
                assert len(sent) == N_AFTER * (2 * 2 + 2)  # two layers replicated, two chunks
                require_equal(values_of(model), values_of(alone))
