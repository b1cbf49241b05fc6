"""Times of training steps with tables: on every rank, or with rows spread over the ranks.

    tfscale run -np 4 python -m tools.table_times --tables 26 --rows 100000 --width 16

Prints a line per rule and layer: milliseconds and samples per second, megabytes that a rank sends
in a step for lookups and gradients, and how many rows the busiest rank was asked for, relative to
the mean. `--layers horovod` alone trains tables on every rank with Horovod's own collectives.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.exchange.tables import Table
from tfscale.trace.events import Listener

RULES = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adam": lambda: keras.optimizers.Adam(0.001),
}


def zipf(n: int, n_rows: int, exponent: float, random: np.random.Generator) -> np.ndarray:
    """Ids of a bounded Zipf distribution, the most frequent first."""
    if n_rows > 1 << 20:  # of a continuous one, which needs no weights of all rows
        least = n_rows ** (1 - exponent)
        values = ((least - 1) * random.random(n) + 1) ** (1 / (1 - exponent))
        return np.minimum(values.astype(np.int64), n_rows) - 1
    weights = np.arange(1, n_rows + 1, dtype=np.float64) ** -exponent
    sums = np.cumsum(weights)
    return np.asarray(np.searchsorted(sums, random.random(n) * sums[-1]))


def build(embedding: type, options: argparse.Namespace) -> keras.Model:
    """A model of tables, dense inputs and two dense layers."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((options.tables,), dtype="int64")
    numbers = keras.Input((13,))
    rows = [
        keras.layers.Flatten()(embedding(options.rows, options.width)(ids[:, i : i + 1]))
        for i in range(options.tables)
    ]
    hidden = keras.layers.Dense(64, "relu")(keras.layers.concatenate([*rows, numbers]))
    return keras.Model([ids, numbers], keras.layers.Dense(1)(hidden))


def busiest(ids: np.ndarray, options: argparse.Namespace, is_spread: bool) -> float:
    """The largest number of distinct ids that one rank holds, relative to the mean."""
    table = Table(options.rows, options.width, is_spread=is_spread)
    counts = np.zeros(tfscale.size())
    for column in ids.T:
        positions = table.positions(np.unique(column))
        counts += np.histogram(positions, table.cuts)[0]
    total = sum(tfscale.allgather_object(counts))
    return float(total.max() / total.mean())


class Ours:
    """tfscale, and the bytes that it exchanges."""

    def __init__(self) -> None:
        tfscale.init()
        self.rank, self.size, self.barrier = tfscale.rank(), tfscale.size(), tfscale.barrier

    def step(self, model: keras.Model, optimizer: Any) -> Callable[[Any, Any], Any]:
        """A training step of a model."""
        model.compile(tfscale.DistributedOptimizer(optimizer), "mse")
        tfscale.prepare(model)
        return model.train_on_batch

    def facts(self, listener: Any, ids: np.ndarray, options: argparse.Namespace) -> dict:
        """Facts of the row besides times."""
        sent = int(listener.take()["bytes"].sum()) / options.steps
        spread = [round(busiest(ids, options, is_spread), 2) for is_spread in (True, False)]
        return {"exchanged_mb": round(sent / 1e6, 3), "busiest": spread}


class Horovod:
    """Horovod in a step of its own, since it has no optimizer for Keras 3."""

    def __init__(self) -> None:
        import horovod.tensorflow as hvd

        hvd.init()
        self.rank, self.size, self._hvd = hvd.rank(), hvd.size(), hvd

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._hvd.allreduce(tf.zeros(1), name="barrier")

    def step(self, model: keras.Model, optimizer: Any) -> Callable[[Any, Any], Any]:
        """A training step of a model; Horovod gathers gradients of tables."""
        optimizer.build(model.trainable_variables)
        variables = [v.value for v in model.trainable_variables]

        @tf.function
        def step(inputs: Any, targets: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
            gradients = [
                self._hvd.allreduce(g, op=self._hvd.Average, name=f"gradient{i}")
                for i, g in enumerate(tape.gradient(loss, variables))
            ]
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        return lambda *batch: step(*batch).numpy()

    def facts(self, listener: Any, ids: np.ndarray, options: argparse.Namespace) -> dict:
        """Nothing."""
        return {}


def main() -> None:
    """Measure, and print JSON lines on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4096, help="samples of all ranks")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rules", default="sgd,adagrad")
    parser.add_argument("--layers", default="replicated,sharded")
    options = parser.parse_args()
    system = Horovod() if options.layers == "horovod" else Ours()
    random = np.random.default_rng(system.rank)
    n = options.batch // system.size
    plain, sharded = keras.layers.Embedding, tfscale.layers.ShardedEmbedding
    kinds = {"replicated": plain, "sharded": sharded, "horovod": plain}
    batches = [
        (
            [
                tf.constant(
                    zipf(n * options.tables, options.rows, options.zipf, random).reshape(n, -1)
                ),
                tf.constant(random.normal(size=(n, 13)).astype("float32")),
            ],
            tf.constant(random.normal(size=(n, 1)).astype("float32")),
        )
        for _ in range(4)
    ]
    for rule in options.rules.split(","):
        for kind in options.layers.split(","):
            model = build(kinds[kind], options)
            step = system.step(model, RULES[rule]())
            for batch in batches[:3]:
                step(*batch)
            listener = Listener(1 << 16) if isinstance(system, Ours) else None
            system.barrier()
            begin = time.perf_counter()
            for i in range(options.steps):
                step(*batches[i % 4])
            system.barrier()
            step_s = (time.perf_counter() - begin) / options.steps
            row = {
                "rule": rule,
                "layer": kind,
                "ms": round(step_s * 1e3, 1),
                "samples_per_s": round(options.batch / step_s),
                **system.facts(listener, batches[0][0][0].numpy(), options),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
            if system.rank == 0:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
