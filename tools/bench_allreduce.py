"""Bandwidth of our allreduce beside mpi4py's, measured in turns in one run.

Run it on two ranks or more: `tfscale run -np 2 python tools/bench_allreduce.py`. Rank 0 prints
JSON. The bus bandwidth counts what each rank must at least send and receive:
2 (n_ranks - 1) / n_ranks times the message per allreduce.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from mpi4py import MPI

import tfscale


def time_s(run: Callable[[], object]) -> float:
    """Return the duration in seconds of one call that all ranks start together."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    run()
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, op=MPI.MAX)


def measure(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median duration in seconds of each, taken in turns after two unmeasured ones."""
    durations: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name, run in runs.items():
            duration_s = time_s(run)
            if turn >= 2:
                durations[name].append(duration_s)
    return {name: statistics.median(values) for name, values in durations.items()}


def make_runs(sent: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return the competitors, each summing `sent` over all ranks.

    A result is there when the call returns; `.numpy()` would only add a copy of it.
    """
    received, tensor = np.empty_like(sent), tf.constant(sent)
    traced = tf.function(lambda x: tfscale.allreduce(x, op=tfscale.Sum, name="bench"))
    return {
        "mpi4py": lambda: MPI.COMM_WORLD.Allreduce(sent, received),
        "eager": lambda: tfscale.allreduce(tensor, op=tfscale.Sum),
        "traced": lambda: traced(tensor),
    }


def main() -> None:
    """Measure the sizes asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[64.0])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    tfscale.init()
    rows = []
    for mebibytes in options.mebibytes:
        sent: np.ndarray = np.ones(int(mebibytes * 2**20 / 4), np.float32)
        seconds = measure(make_runs(sent), options.repeats)
        moved = 2 * (tfscale.size() - 1) / tfscale.size() * sent.nbytes
        rows.append(
            {
                "mebibytes": mebibytes,
                "median_s": seconds,
                "bus_gb_per_s": {name: moved / s / 1e9 for name, s in seconds.items()},
                "of_mpi4py": {name: seconds["mpi4py"] / s for name, s in seconds.items()},
            }
        )
    if tfscale.rank() == 0:
        result = {"n_ranks": tfscale.size(), "mpi": MPI.Get_library_version()[:40].strip("\0\n")}
        print(json.dumps({**result, "sizes": rows}, indent=2))
    tfscale.shutdown()


if __name__ == "__main__":
    main()
