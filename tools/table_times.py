"""Times of training steps with tables: on every rank, or with rows spread over the ranks.

    tfscale run -np 4 python -m tools.table_times --tables 26 --rows 100000 --width 16

Prints a line per rule and layer: milliseconds and samples per second, megabytes that a rank sends
in a step for lookups and gradients, and how many rows the busiest rank was asked for, relative to
the mean.
"""

import argparse
import json
import resource
import time

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
    tfscale.init()
    random = np.random.default_rng(tfscale.rank())
    n = options.batch // tfscale.size()
    kinds = {"replicated": keras.layers.Embedding, "sharded": tfscale.layers.ShardedEmbedding}
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
            model.compile(tfscale.DistributedOptimizer(RULES[rule]()), "mse")
            tfscale.prepare(model)
            for batch in batches[:3]:
                model.train_on_batch(*batch)
            listener = Listener(1 << 16)
            tfscale.barrier()
            begin = time.perf_counter()
            for i in range(options.steps):
                model.train_on_batch(*batches[i % 4])
            tfscale.barrier()
            step_s = (time.perf_counter() - begin) / options.steps
            sent = int(listener.take()["bytes"].sum()) / options.steps
            shown = batches[0][0][0].numpy()
            row = {
                "rule": rule,
                "layer": kind,
                "ms": round(step_s * 1e3, 1),
                "samples_per_s": round(options.batch / step_s),
                "exchanged_mb": round(sent / 1e6, 3),
                "busiest": [round(busiest(shown, options, s), 2) for s in (True, False)],
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
            if tfscale.rank() == 0:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
