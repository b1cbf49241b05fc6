"""Measured program: steps of `train_on_batch`, then of `fit` on the same model, then both again.

What `fit` prepares stays with the model, so the first `train_on_batch` is the step without it.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import tfscale
from benchmarks import worker
from benchmarks.systems import MOST_STEPS, Case, Tfscale
from benchmarks.workloads import WORKLOADS, Workload, make_batch, make_loss

_STEPS = 6  # of one block


class Clock(keras.callbacks.Callback):
    """Times the steps of an epoch, without its ends and the first steps.

    Attributes:
        seconds: Of each step, up to the end of the next one's.
        sent_bytes: By this host's link, per step.
        idle_share: Of the time of this machine's cores.
    """

    def __init__(self, warmup: int = 1) -> None:
        super().__init__()
        self._warmup = warmup  # the first step waits for the input
        self._ended = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note when a step ended."""
        now, sent = time.perf_counter(), worker.link_bytes()
        if batch < self._warmup:
            self._sent, self.seconds = sent, []
            self._idle = worker.IdleShare()
        else:
            self.seconds.append(now - self._ended)
            self.sent_bytes = (sent - self._sent) / len(self.seconds)
            self.idle_share = self._idle.so_far()
        self._ended = now


class UntilDecided(keras.callbacks.Callback):
    """Ends `fit` when "auto" has chosen its exchange."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Look whether it has."""
        self.model.stop_training |= self._optimizer.strategy.outcome is not None


class Fit:
    """A model to be trained as users do: `fit`, GlobalBatches and the callback that broadcasts.

    Attributes:
        model: Compiled and prepared.
        own: The batch of this rank.
    """

    def __init__(self, workload: Workload, system: Tfscale, n_steps: int) -> None:
        self.model = workload.build()
        self._is_auto = system.exchange == "auto" and system.size > 1
        sgd = keras.optimizers.SGD(1e-4, momentum=0.9)
        self._optimizer = system.optimizer(sgd, Case(workload, self.model))
        self.model.compile(self._optimizer, loss=make_loss(workload), jit_compile=False)
        tfscale.prepare(self.model)
        batches = [make_batch(workload, rank, system.size) for rank in range(system.size)]
        self.own = batches[system.rank]
        x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        self._data = tfscale.data.GlobalBatches(
            np.tile(x, (n_steps, *[1] * (x.ndim - 1))),
            np.tile(y, (n_steps, *[1] * (y.ndim - 1))),
            batch_size=len(x),
            shuffle=False,
        )
        self._broadcast = tfscale.callbacks.BroadcastGlobalVariablesCallback(0)

    def settle(self) -> None:
        """Trace, and train until "auto" has decided."""
        more = [UntilDecided(self._optimizer)] if self._is_auto else []
        self.model.fit(
            self._data,
            epochs=MOST_STEPS if self._is_auto else 1,
            verbose=0,
            callbacks=[self._broadcast, *more],
        )

    def run(self, clock: Clock) -> None:
        """Train an epoch; the clock times its steps."""
        # The clock first: what others do after the last batch, such as averages of moving
        # statistics, is done once per epoch, and an epoch has few steps here.
        self.model.fit(self._data, verbose=0, callbacks=[clock, self._broadcast])


def main() -> None:
    """Measure one model under one exchange."""
    parser = worker.parser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--exchange", required=True)
    options = parser.parse_args()
    system = Tfscale(options.exchange)
    keras.utils.set_random_seed(1)
    fitted = Fit(WORKLOADS[options.model], system, _STEPS + 1)
    model, own, clock = fitted.model, fitted.own, Clock()

    def on_batches() -> float:
        model.train_on_batch(*own)
        tfscale.barrier()
        start = time.perf_counter()
        for _ in range(_STEPS):
            model.train_on_batch(*own)
        return (time.perf_counter() - start) / _STEPS

    def fit() -> float:
        fitted.run(clock)
        return sum(clock.seconds) / _STEPS

    on_batches()
    start_s = worker.since_start()
    before = [on_batches() for _ in range(options.repeats)]
    fitted.settle()
    samples = {"train_on_batch": before, "fit": [], "train_on_batch after fit": []}
    for _ in range(options.repeats):
        samples["fit"].append(fit())
        samples["train_on_batch after fit"].append(on_batches())
    kept = {name: worker.Samples(seconds) for name, seconds in samples.items()}
    worker.write(options.output, system.rank, kept, start_s=start_s, steps=_STEPS)
    system.end()


if __name__ == "__main__":
    main()
