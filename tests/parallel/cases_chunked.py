"""Chunks and replicated layers equal one process."""

import keras
import numpy as np
import pytest

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import engine_only, sizes
from tests.helpers.equality import BATCH, OPTIMIZERS, check, conv_model, mlp
from tests.helpers.ranks import float64
from tfscale.config import PlanError
from tfscale.testing import inspect


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
        listener = inspect.listen()
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
    """2 f gathers for dense layers, one allreduce per chunk, nothing in evaluation."""
    with float64():
        keras.utils.set_random_seed(1)
        model = mlp()()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1),
            exchange=tfscale.Chunked(first_chunk_layers=1, replicated_dense=2),
        )
        model.compile(optimizer=optimizer, loss="mse")
        tfscale.prepare(model)
        n_local = BATCH // tfscale.size()
        x, y = np.ones((n_local, 6)), np.ones((n_local, 3))
        model.train_on_batch(x, y)
        inspect.take_collectives()
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        assert not inspect.take_collectives()
        model.train_on_batch(x, y)
        events = [e for e in inspect.take_collectives() if e.slot >= 0]
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
    with pytest.raises(PlanError, match=r"tfscale.prepare\(model\)"):
        model.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
    tfscale.prepare(model)
    with pytest.raises(PlanError, match="training=True"):
        model.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
