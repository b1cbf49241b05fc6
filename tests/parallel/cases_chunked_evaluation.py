"""Chunks and replicated layers: evaluation and checkpoints between two steps change nothing."""

import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.spawn import engine_only, sizes
from tests.parallel.cases_chunked import mlp
from tests.parallel.cases_equality import BATCH, OPTIMIZERS, TOLERANCE, float64, require_equal
from tfscale.comm import runtime

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
    """Return what a user may do between two steps: evaluate, predict, read."""
    (x,), (y,) = samples(1)
    traced = tf.function(lambda: tf.add_n([tf.reduce_sum(v.value) for v in model.weights]))
    loss = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return [np.asarray(loss), model.predict(x, verbose=0), traced().numpy(), *model.get_weights()]


def saved_and_restored(model, make):
    """Save on rank 0 in three ways; return a new model for each, restored from it on all ranks."""
    folder = Path(tfscale.broadcast_object(tempfile.mkdtemp(), 0))
    if tfscale.rank() == 0:
        model.save(folder / "model.keras")
        model.save_weights(folder / "model.weights.h5")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "tf"))
    tfscale.barrier()
    whole = tfscale.load_model(folder / "model.keras", exchange=model.optimizer.strategy)
    tfscale.prepare(whole)
    weights, checkpoint = distributed(make), distributed(make)
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(folder / "model.weights.h5")
    checkpoint.optimizer.build(checkpoint.trainable_variables)
    names = {"model": checkpoint, "optimizer": checkpoint.optimizer}
    tf.train.Checkpoint(**names).read(str(folder / "tf")).assert_consumed()
    tfscale.barrier()
    if tfscale.rank() == 0:
        shutil.rmtree(folder)
    return [whole, weights, checkpoint]


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
            for mine, single in zip(look_at(ours), look_at(alone), strict=True):
                np.testing.assert_allclose(mine, single, rtol=0, atol=TOLERANCE)
            restored = saved_and_restored(ours, make)
            run(alone, after)
            for model in (ours, *restored):
                runtime.backend().take_events()
                run(model, after, n, rank)
                sent = [e for e in runtime.backend().take_events() if e.plan >= 0 and e.slot >= 0]
                assert len(sent) == N_AFTER * (2 * 2 + 2)  # two layers replicated, two chunks
                require_equal(values_of(model), values_of(alone))
