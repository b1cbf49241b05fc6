"""Measured program: `fit` of the same Keras model, on TensorFlow with tfscale, or on PyTorch.

There `keras.distribution.DataParallel` averages gradients, through PyTorch's DDP on gloo, in the
environment of `make ddp`. "keras-torch-compute" and "keras-tensorflow-compute" exchange nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import worker

_N_STEPS = 9  # of an epoch, the first two of which do not count


def start_torch(rank: int, size: int, folder: Path, is_alone: bool) -> None:
    """Join PyTorch's process group, and have Keras use it."""
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    if is_alone:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("FI_TCP_IFACE", "lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    store = f"file://{folder.absolute()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


def main() -> None:
    """Measure the steps of one model in `fit`."""
    parser = worker.parser()
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    _, backend, *exchange = options.system.split("-")
    os.environ["KERAS_BACKEND"] = backend
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    is_alone = exchange == ["compute"]
    end = contextlib.ExitStack()
    if backend == "torch":
        start_torch(rank, size, options.output, is_alone)
    import keras

    from benchmarks.workloads import WORKLOADS, make_batch, make_loss

    keras.utils.set_random_seed(1)
    workload = WORKLOADS[options.model]
    x, y = make_batch(workload, rank, size)
    model = workload.build()
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    callbacks: list[Any] = []
    if backend == "tensorflow" and not is_alone:
        import tfscale

        tfscale.init()
        end.callback(tfscale.shutdown)
        given = tfscale.Sharded() if exchange == ["sharded"] else "allreduce"
        optimizer = tfscale.DistributedOptimizer(optimizer, exchange=given)
        callbacks.append(tfscale.callbacks.BroadcastGlobalVariablesCallback(0))
    model.compile(optimizer, loss=make_loss(workload), jit_compile=False)

    class Clock(keras.callbacks.Callback):
        """Notes when steps end."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.ended: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ended.append(time.perf_counter())

    clock = Clock()

    def fit() -> list[float]:
        import numpy as np

        repeated = [np.concatenate([part] * _N_STEPS) for part in (x, y)]
        model.fit(
            *repeated, batch_size=len(x), shuffle=False, verbose=0, callbacks=[*callbacks, clock]
        )
        return [b - a for a, b in zip(clock.ended[1:], clock.ended[2:], strict=False)]

    fit()
    start_s = worker.since_start()
    seconds = [second for _ in range(options.repeats) for second in fit()]
    worker.write(options.output, rank, {options.model: worker.Samples(seconds)}, start_s=start_s)
    end.close()


if __name__ == "__main__":
    main()
