"""Measured program: steps of `train_on_batch`, then of `fit` on the same model, then both again.

`fit` has what users give it: GlobalBatches and the callback that broadcasts. What it prepares stays
with the model, so the first `train_on_batch` is the step without any of it.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import tfscale
from benchmarks import worker
from benchmarks.systems import Case, Tfscale
from benchmarks.workloads import WORKLOADS, make_batch, make_loss

_STEPS = 6  # of one block


class Clock(keras.callbacks.Callback):
    """Times the steps of an epoch, without the ends of it."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin."""
        if batch == 1:  # the first one waits for the input
            self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End."""
        self.seconds = (time.perf_counter() - self._began) / batch if batch else 0.0


def main() -> None:
    """Measure one model under one exchange."""
    parser = worker.parser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--exchange", required=True)
    options = parser.parse_args()
    system = Tfscale(options.exchange)
    keras.utils.set_random_seed(1)
    workload = WORKLOADS[options.model]
    model = workload.build()
    optimizer = system.optimizer(keras.optimizers.SGD(1e-4, momentum=0.9), Case(workload, model))
    model.compile(optimizer, loss=make_loss(workload), jit_compile=False)
    tfscale.prepare(model)
    batches = [make_batch(workload, rank, system.size) for rank in range(system.size)]
    own = batches[system.rank]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    n_steps = _STEPS + 1
    data = tfscale.data.GlobalBatches(
        np.tile(x, (n_steps, *[1] * (x.ndim - 1))),
        np.tile(y, (n_steps, *[1] * (y.ndim - 1))),
        batch_size=len(x),
        shuffle=False,
    )
    clock = Clock()
    # First: what others do after the last batch, such as averages of moving statistics, is done
    # once per epoch, and an epoch has few steps here.
    callbacks = [clock, tfscale.callbacks.BroadcastGlobalVariablesCallback(0)]

    def on_batches() -> float:
        model.train_on_batch(*own)
        tfscale.barrier()
        start = time.perf_counter()
        for _ in range(_STEPS):
            model.train_on_batch(*own)
        return (time.perf_counter() - start) / _STEPS

    def fit() -> float:
        model.fit(data, verbose=0, callbacks=callbacks)
        return clock.seconds

    on_batches()
    start_s = worker.since_start()
    before = [on_batches() for _ in range(options.repeats)]
    fit()
    samples = {"train_on_batch": before, "fit": [], "train_on_batch after fit": []}
    for _ in range(options.repeats):
        samples["fit"].append(fit())
        samples["train_on_batch after fit"].append(on_batches())
    kept = {name: worker.Samples(seconds) for name, seconds in samples.items()}
    worker.write(options.output, system.rank, kept, start_s=start_s, steps=_STEPS)
    system.end()


if __name__ == "__main__":
    main()
