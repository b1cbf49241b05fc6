"""Measured program: steps of `fit` with and without a CommunicationReport, in turn."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import keras

import tfscale
from benchmarks import worker
from benchmarks.worker_single import Model
from benchmarks.workloads import WORKLOADS

_BLOCK_S = 4.0  # seconds of one block, about


class Clock(keras.callbacks.Callback):
    """Times an epoch with the lines that a report writes, without its final picture."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin."""
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End."""
        self.seconds = time.perf_counter() - self._began


def main() -> None:
    """Measure one model."""
    parser = worker.parser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    options = parser.parse_args()
    tfscale.init()
    keras.utils.set_random_seed(1)
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-4, momentum=0.9))
    start, clock = tfscale.callbacks.BroadcastGlobalVariablesCallback(0), Clock()
    model = Model(WORKLOADS[options.model], optimizer, [])
    with tempfile.TemporaryDirectory() as folder:
        report = tfscale.callbacks.CommunicationReport(folder)
        both = {"without": [start, clock], "with": [start, report, clock]}

        def block(name: str, steps: int) -> float:
            model.callbacks = both[name]
            tfscale.barrier()
            model.seconds_per_step(steps)
            return clock.seconds / steps

        block("without", 1)
        start_s = worker.since_start()
        own = block("without", 4)
        steps = max(10, round(_BLOCK_S / max(tfscale.allgather_object(own))))
        kept = worker.sample_in_turn(
            list(both), lambda name: block(name, steps), options.warmup, options.repeats
        )
    worker.write(options.output, tfscale.rank(), kept, start_s=start_s, steps=steps)
    tfscale.shutdown()


if __name__ == "__main__":
    main()
