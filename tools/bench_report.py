"""What CommunicationReport costs: the same training with and without it, in turn.

tfscale run -np 2 python tools/bench_report.py [--every-n-steps 1]
"""

import argparse
import statistics
import tempfile
import time

import keras
import numpy as np

import tfscale
from tfscale.callbacks import BroadcastGlobalVariablesCallback, CommunicationReport


class Stopwatch(keras.callbacks.Callback):
    """Times of epochs, what other callbacks do at their end included. Comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        """Start."""
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Stop."""
        self.seconds.append(time.perf_counter() - self._begin)


class Timed(CommunicationReport):
    """A report that adds up the time spent in its hooks, the last one excepted."""

    spent_s = 0.0
    cpu_s = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        """Measure."""
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        super().on_train_batch_begin(batch, logs)
        self.spent_s += time.perf_counter() - begin
        self.cpu_s += time.thread_time() - begin_cpu

    def on_train_batch_end(self, batch, logs=None):
        """Measure."""
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        super().on_train_batch_end(batch, logs)
        self.spent_s += time.perf_counter() - begin
        self.cpu_s += time.thread_time() - begin_cpu

    def on_epoch_end(self, epoch, logs=None):
        """Measure."""
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        super().on_epoch_end(epoch, logs)
        self.spent_s += time.perf_counter() - begin
        self.cpu_s += time.thread_time() - begin_cpu


def build(units: int) -> keras.Model:
    """Return a compiled model whose gradients travel in about eight buckets."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(units, "relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((units,)), *layers])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-3)), loss="mse")
    return model


def main() -> None:
    """Train pairs of epochs; rank 0 prints the difference."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every-n-steps", type=int, default=10)
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    tfscale.init()
    model = build(options.units)
    x = np.random.default_rng(0).normal(size=(64 * options.steps, options.units)).astype("float32")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    spent_s = cpu_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 * options.pairs + 2):
            is_on, watch = turn % 2 == 1, Stopwatch()
            report = [Timed(folder, options.every_n_steps)] if is_on else []
            callbacks = [BroadcastGlobalVariablesCallback(0), *report, watch]
            model.fit(
                x, x, 64, epochs=options.epochs, shuffle=False, verbose=0, callbacks=callbacks
            )
            if turn > 1:  # The first pair traces and warms up.
                seconds[is_on].append(sum(watch.seconds))
                spent_s += sum(r.spent_s for r in report)
                cpu_s += sum(r.cpu_s for r in report)
    if tfscale.rank() == 0:
        off, on = (statistics.median(seconds[key]) for key in (False, True))
        changes = [100 * (b / a - 1) for a, b in zip(seconds[False], seconds[True], strict=True)]
        per_step = [1e3 * time_s / (options.epochs * options.steps) for time_s in (off, on)]
        print("step without {:.3f} ms, with {:.3f} ms".format(*per_step))
        print(f"change, median of {options.pairs} pairs: {statistics.median(changes):+.2f} %")
        total = sum(seconds[True]) / 100
        print(f"in the report's hooks: {spent_s / total:.2f} % of the time")
        print(f"computing there, without waiting for others: {cpu_s / total:.2f} %")


if __name__ == "__main__":
    main()
