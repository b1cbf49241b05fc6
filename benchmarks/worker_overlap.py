"""Measured program: overlap ratio R and step time of `Chunked` by batch, k and f ([T] 3.7 to 3.10).

The model is trained by `fit` under a CommunicationReport that records every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfscale
from benchmarks import worker
from benchmarks.overlap_cases import Case, parse_case
from benchmarks.workloads import WORKLOADS, Workload, make_loss, vgg_a
from tfscale.files import read_json_lines
from tfscale.measure.report import FILE_NAME


def make_data(workload: Workload, batch: int, n_steps: int) -> tfscale.data.GlobalBatches:
    """Return as many batches of pictures made up."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(batch, *workload.shape)).astype("float32")
    y = rng.integers(0, workload.classes, size=batch)
    repeats = [1] * len(workload.shape)
    return tfscale.data.GlobalBatches(
        np.tile(x, (n_steps, *repeats)), np.tile(y, n_steps), batch_size=batch, shuffle=False
    )


def train(workload: Workload, case: Case, n_steps: int, folder: Path) -> None:
    """Train a new model for a few steps; rank 0 leaves their record in the folder."""
    keras.utils.set_random_seed(1)
    model = vgg_a(case.filters) if case.filters else workload.build()
    strategy = tfscale.Chunked(case.first_chunk - case.replicated, case.replicated, chunks=2)
    optimizer = tfscale.DistributedOptimizer(
        keras.optimizers.SGD(1e-4, momentum=0.9), exchange=strategy
    )
    model.compile(optimizer, loss=make_loss(workload), jit_compile=False)
    callbacks = [
        tfscale.callbacks.BroadcastGlobalVariablesCallback(0),
        tfscale.callbacks.CommunicationReport(folder, every_n_steps=1),
    ]
    # The first step, which traces the model, is never recorded.
    data = make_data(workload, case.batch, n_steps + 1)
    model.fit(data, verbose=0, callbacks=callbacks)


def steps_of(rows: Sequence[dict[str, Any]], n_ranks: int, warmup: int) -> list[list[dict]]:
    """Return the recorded steps by rank, in order, without the first ones.

    Args:
        rows: Of a CommunicationReport.
        n_ranks: Number of ranks.
        warmup: Recorded steps of each rank to leave out.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    return [[row for row in steps if row["rank"] == rank][warmup:] for rank in range(n_ranks)]


def main() -> None:
    """Measure one case of one model."""
    parser = worker.parser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--case", type=parse_case, required=True)
    options = parser.parse_args()
    tfscale.init()
    rank, name = tfscale.rank(), str(options.case)
    with tempfile.TemporaryDirectory() as folder:
        n_steps = options.warmup + options.repeats
        train(WORKLOADS[options.model], options.case, n_steps, Path(folder))
        rows = read_json_lines(Path(folder) / FILE_NAME) if rank == 0 else []
    by_rank = tfscale.broadcast_object(steps_of(rows, tfscale.size(), options.warmup), 0)
    samples = {name: worker.Samples([step["step_s"] for step in by_rank[rank]])}
    ratios = {name: [[step["overlap_percent"] for step in own] for own in by_rank]}
    start_s = worker.since_start()
    worker.write(options.output, rank, samples, start_s=start_s, overlap_percent=ratios)
    tfscale.shutdown()


if __name__ == "__main__":
    main()
