"""Tables of places where layers sleep: each system beside the limit that was measured with it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import layer_tables
from benchmarks.cells import COMPUTE_ONLY, is_asleep
from benchmarks.markdown import milliseconds, table
from benchmarks.rows import Runs
from benchmarks.step_tables import compute_of, name_of


def groups_of(runs: Runs) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs whose layers slept, by group and system."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        if is_asleep(run["place"]) and "error" not in run:
            found.setdefault(run["group"], {}).setdefault(run["system"], []).append(run)
    return found


def samples_of(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """The seconds of all steps, or calls, of a system's runs."""
    return [s for run in runs for samples in run["samples"].values() for s in samples]


def limit_s(system: str, compute_s: float, stream_s: float, model: str) -> float:
    """The shortest step whose communication overlaps as much as it can.

    Args:
        system: An allreduce leaves the forward pass without anything to overlap with.
        compute_s: A step that only computes.
        stream_s: A stream of TCP with the bytes of the exchange.
        model: Whose forward pass it is.
    """
    if system not in ("tfscale-allreduce", "horovod", "ddp"):
        return max(compute_s, stream_s)
    found = layer_tables.read()[model]
    forward_s = compute_s * found["forward_s"] / (found["forward_s"] + found["backward_s"])
    return forward_s + max(compute_s - forward_s, stream_s)


def sent_bytes_of(runs: Sequence[Mapping[str, Any]]) -> float:
    """The bytes that a host's link sends in a step, or a call."""
    return statistics.median(n_bytes for run in runs for n_bytes in run["sent_bytes"].values())


def under_way(runs: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds that rank 0's gradients, and averages of models, were under way in a step."""
    seconds = [
        [run["wire_s"][kind] / run.get("slow_motion", 1) for kind in ("gradients", "averages")]
        for run in runs
        if "wire_s" in run
    ]
    if not seconds:
        return ""
    gradients, averages = (1e3 * statistics.median(found) for found in zip(*seconds, strict=True))
    return f"{gradients:.0f} + {averages:.0f}" if averages else f"{gradients:.0f}"


def group_table(group: str, systems: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A heading with the limits of a group, and a line per system."""
    model, place = group.split()
    seconds = {system: statistics.median(samples_of(runs)) for system, runs in systems.items()}
    anyone = next(iter(systems.values()))[0]
    idle = min(run["idle_share"] for runs in systems.values() for run in runs)
    factor = anyone.get("slow_motion", 1)
    slow = f"Times in slow motion, {factor} times, divided by it. " if factor > 1 else ""
    lines = []
    for system, runs in systems.items():
        line = [name_of(system), milliseconds(samples_of(runs))]
        alone = seconds.get(compute_of(system))
        if alone and "tcp" in seconds and system not in (*COMPUTE_ONLY, "tcp"):
            share = sent_bytes_of(runs) / sent_bytes_of(systems["tcp"])
            best = limit_s("", alone, seconds["tcp"], model)
            own = limit_s(system, alone, share * seconds["tcp"], model)
            line += [f"{limit / seconds[system]:.3f}" for limit in (best, own)]
        else:
            line += ["", ""]
        line.append(f"{sent_bytes_of(runs) / 1e6:.1f}" if sent_bytes_of(runs) else "")
        line.append(under_way(runs))
        line.append(f"{statistics.median(run['peak_bytes'] for run in runs) / 2**20:.0f}")
        lines.append(line)
    title = f"### {model}, {place}, {anyone['n_ranks']} ranks\n\n"
    title += f"{slow}The machine's cores were idle for {idle:.0%} of the time at least.\n\n"
    head = ["system", "ms per step", "of the limit", "of its own limit", "MB sent per host"]
    head += ["gradients + averages under way, ms", "MiB per rank"]
    return title + table(head, lines)


def tables(runs: Runs) -> list[str]:
    """A table for each model and place."""
    return [group_table(group, systems) for group, systems in groups_of(runs).items()]
