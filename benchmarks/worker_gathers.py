"""Measured program: how much of the gather of parameters overlaps with which computation.

The engine tells when each gather was on the wire, TensorFlow's profiler when kernels ran. A moment
with gathers on the wire and kernels of a forward pass running counts as overlap with that pass.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfscale
from benchmarks import worker
from benchmarks.kernel_times import BACKWARD, FORWARD, Span, kernels_of
from benchmarks.systems import start
from benchmarks.worker_step import make_step
from benchmarks.workloads import WORKLOADS
from tfscale.comm import runtime
from tfscale.measure.analysis import Intervals, length, merged
from tfscale.trace.events import Listener, clock_ns

_NAME = "parameters of "  # of the collectives that gather parameters
_JOINED_NS = 300_000  # gaps that a picture cannot show


def shares_of(gathers: list[Span], passes: dict[str, list[Span]]) -> dict[str, float]:
    """Return the share of the time with gathers on the wire that each pass overlaps.

    Args:
        gathers: When each gather was on the wire.
        passes: When kernels ran.

    Returns:
        By pass; "exposed" is what is left of 1. Where kernels of both passes run the moment counts
        as the forward pass's.
    """
    wire = merged(gathers)
    left, shares = Intervals(wire), {}
    for name in (FORWARD, BACKWARD):
        remaining = [
            part for span in left.parts for part in Intervals(merged(passes[name])).without(*span)
        ]
        shares[name] = (length(left.parts) - length(remaining)) / length(wire)
        left = Intervals(remaining)
    return {**shares, "exposed": length(left.parts) / length(wire)}


def gathers_by_step(events: np.ndarray, begins: list[int]) -> list[list[Span]]:
    """Return when the gathers that each step posted were on the wire, the last step's left out.

    Args:
        events: Of the engine.
        begins: When each step was called.
    """
    engine: Any = runtime.backend()
    found: list[list[Span]] = [[] for _ in begins]
    for event in events[events["slot"] >= 0]:
        step = int(np.searchsorted(begins, event["posted_ns"], "right")) - 1
        name = engine.slot_name(int(event["plan"]), int(event["slot"]))
        if step >= 0 and name.startswith(_NAME):
            found[step].append((int(event["started_ns"]), int(event["ended_ns"])))
    return found[:-1]


def picture(gathers: list[Span], passes: dict[str, list[Span]]) -> dict[str, list[list[float]]]:
    """Return begins and ends in ms of what ran around one step's gathers, for a picture."""
    begin = min(b for b, _ in gathers)
    last = max(e for _, e in gathers)
    margin = (last - begin) // 2
    low, high = begin - margin, last + margin
    rows = {"gathers": gathers, **passes}
    shown: dict[str, list[list[float]]] = {}
    for name, spans in rows.items():
        near = [(b, e + _JOINED_NS) for b, e in spans if low < e and b < high]
        joined = [(b, e - _JOINED_NS) for b, e in merged(near)]
        shown[name] = [[(b - begin) / 1e6, (e - begin) / 1e6] for b, e in joined]
    return shown


def main() -> None:
    """Measure the steps of one model."""
    parser = worker.parser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    options = parser.parse_args()
    system = start(options.system)
    keras.utils.set_random_seed(1)
    workload = WORKLOADS[options.model]
    model = workload.build()
    step = make_step(workload, model, system)
    step()
    start_s = worker.since_start()
    system.barrier()
    worker.sample(step, options.warmup, 0)
    listener, begins = Listener(), []

    def run() -> None:
        for _ in range(options.repeats + 1):
            begins.append(clock_ns())
            step()

    passes = kernels_of(model.name, run)
    tfscale.barrier()
    steps = gathers_by_step(listener.take(), begins)
    shares = [shares_of(gathers, passes) for gathers in steps]
    wire = [length(merged(gathers)) / 1e9 for gathers in steps]
    # By how much the next forward pass began before the last gather had ended.
    ahead = [
        (max(e for _, e in gathers) - min(b for b, _ in passes[FORWARD] if b > next_begin)) / 1e9
        for gathers, next_begin in zip(steps, begins[1:], strict=True)
    ]
    worker.write(
        options.output,
        system.rank,
        {"wire": worker.Samples(wire)},
        start_s=start_s,
        shares=tfscale.allgather_object(shares, name="shares"),
        ahead_s=tfscale.allgather_object(ahead, name="ahead"),
        picture=picture(steps[-1], passes),
    )
    system.end()


if __name__ == "__main__":
    main()
