"""Measured program: `fit` in one process, plain Keras and tfscale in turn."""

from __future__ import annotations

import time

import keras
import numpy as np

import tfscale
from benchmarks import worker
from benchmarks.workloads import WORKLOADS, Workload, make_batch, make_loss

_BLOCK_S = 2.0  # seconds of one block, about


class Model:
    """A model, and what trains it for some steps.

    Args:
        workload: What is trained.
        optimizer: Plain, or wrapped.
        callbacks: Of `fit`.
    """

    def __init__(self, workload: Workload, optimizer: object, callbacks: list) -> None:
        self.model, self.callbacks = workload.build(), callbacks
        self.model.compile(optimizer=optimizer, loss=make_loss(workload), jit_compile=False)
        self.pictures, self.targets = make_batch(workload, 0, 1)

    def seconds_per_step(self, steps: int) -> float:
        """Train, and return the mean duration of a step."""
        pictures, targets = (np.tile(x, (steps, *[1] * (x.ndim - 1))) for x in self._batch())
        start = time.perf_counter()
        batch = len(self.pictures)
        self.model.fit(
            pictures, targets, batch_size=batch, verbose=0, shuffle=False, callbacks=self.callbacks
        )
        return (time.perf_counter() - start) / steps

    def _batch(self) -> tuple[np.ndarray, np.ndarray]:
        return self.pictures, self.targets


def main() -> None:
    """Measure one model."""
    parser = worker.parser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    options = parser.parse_args()
    tfscale.init()
    keras.utils.set_random_seed(1)
    workload = WORKLOADS[options.model]
    sgd = keras.optimizers.SGD
    start_callbacks = [tfscale.callbacks.BroadcastGlobalVariablesCallback(0)]
    both = {
        "keras": Model(workload, sgd(1e-4, momentum=0.9), []),
        "tfscale": Model(
            workload, tfscale.DistributedOptimizer(sgd(1e-4, momentum=0.9)), start_callbacks
        ),
    }
    for model in both.values():
        model.seconds_per_step(1)
    start_s = worker.since_start()
    steps = max(2, round(_BLOCK_S / both["keras"].seconds_per_step(2)))
    kept = worker.sample_in_turn(
        list(both), lambda n: both[n].seconds_per_step(steps), options.warmup, options.repeats
    )
    worker.write(options.output, 0, kept, start_s=start_s, steps=steps)
    tfscale.shutdown()


if __name__ == "__main__":
    main()
