"""A short training job in which the last rank fails: `python job.py EXCHANGE KIND`."""

import hashlib
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd

BATCH, STEPS = 4, 12  # of each rank, per epoch
EXCHANGES = {
    "allreduce": lambda: tfscale.Allreduce(),
    "chunked": lambda: tfscale.Chunked(first_chunk_layers=1, replicated_dense=0),
    "dense": lambda: tfscale.Chunked(replicated_dense=1),
    "sharded": lambda: tfscale.Sharded(dense="weights"),
    "local": lambda: tfscale.LocalSGD(groups=2, interval=4),
    "adaptive": lambda: tfscale.Allreduce(),
}
# The step in which it happens: within an interval of local SGD, the first one of a larger batch.
STEP = {"adaptive": STEPS}


def act(kind):
    """Let this rank fail; return the factor of its loss if it does not."""
    if kind == "exception":
        raise RuntimeError("injected at rank 1")
    if kind == "os._exit":
        os._exit(7)
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    return np.nan if kind.startswith("NaN") else 1.0


def failing(loss, kind, step):
    """Return a loss that fails in the middle of a step: nothing has been exchanged in it yet."""
    steps = iter(range(10**6))

    def factor():
        return act(kind) if next(steps) == step else 1.0

    def wrapped(y, prediction):
        value = loss(y, prediction)
        return value * tf.reshape(tf.py_function(factor, [], value.dtype), [])

    return wrapped


def data(exchange: str, kind: str, rank: int):
    """Return x, y and batch_size for `fit`."""
    is_global = exchange == "adaptive"
    n_ranks = tfscale.size()
    n = BATCH * STEPS * (n_ranks if is_global else 1)
    random = np.random.default_rng(0 if is_global or kind == "same data" else rank)
    x = random.normal(size=(n, 6)).astype("float32")
    if kind == "short data" and rank == 1:
        x = x[:-BATCH]
    y = x.sum(axis=1, keepdims=True)
    if is_global:
        return tfscale.data.GlobalBatches(x, y, batch_size=n_ranks * BATCH, seed=1), None, None
    if kind == "short data":  # of a length that no rank knows beforehand
        parts = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
        spec = tuple(tf.TensorSpec([None, k], tf.float32) for k in (6, 1))
        generated = tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec)
        return generated, None, None
    return x, y, BATCH


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # whole lines: ranks share the output
    exchange, kind = sys.argv[1:3]
    hvd.init()
    rank = hvd.rank()
    is_odd = rank == hvd.size() - 1
    keras.utils.set_random_seed(1)
    # Vectors that are cut, where ranks of a host deal with them together.
    width = 20000 if "TFSCALE_RANKS_PER_HOST" in os.environ else 8
    width += kind == "other model" and is_odd
    layers = [keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    momentum = 0.8 if kind == "other optimizer" and is_odd else 0.9
    inner = keras.optimizers.SGD(0.05, momentum=momentum)
    nonfinite = {"NaN": "raise", "NaN skipped": "skip"}.get(kind, "ignore")
    optimizer = hvd.DistributedOptimizer(inner, exchange=EXCHANGES[exchange](), nonfinite=nonfinite)
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer, failing(loss, kind if is_odd else "", STEP.get(exchange, 5)))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if kind == "no callbacks" and is_odd:
        callbacks = []
    elif exchange == "adaptive":
        callbacks.append(tfscale.callbacks.BatchSizeSchedule({1: 2 * hvd.size() * BATCH}))
    x, y, batch_size = data(exchange, kind, rank)
    model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    digest = hashlib.blake2b(digest_size=8)
    for variable in model.variables:
        digest.update(variable.numpy().tobytes())
    print(f"weights of rank {rank}: {digest.hexdigest()} .", flush=True)


if __name__ == "__main__":
    main()
