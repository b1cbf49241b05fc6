"""Tables and pictures from results: `python -m benchmarks.report results.json --output folder`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.numbers import bus_bandwidth, paired_ratio, physical_limit, spread
from tfscale.cluster.layout import parse_rate

MEMORY = "memory"
_FACTS = ("allreduce_bytes", "least_bytes")
Runs = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One case of one group: samples per round of each system.

    Attributes:
        group: Of the cells.
        case: Bytes or model.
        place: Of the systems that exchange.
        n_ranks: Number of ranks.
        rounds: Per system a list of rounds, each a list of durations in seconds.
        facts: What the workers found out besides, such as "allreduce_bytes".
    """

    group: str
    case: str
    place: str
    n_ranks: int
    rounds: dict[str, list[list[float]]]
    facts: dict[str, float]

    def median_s(self, system: str) -> float:
        """Return the median over all rounds."""
        return spread([s for one in self.rounds[system] for s in one]).median


def collect(runs: Runs, suite: str) -> list[Row]:
    """Gather the runs of a suite by group and case; failed runs are left out."""
    rows: dict[tuple[str, str], Row] = {}
    for run in sorted(runs, key=lambda run: run["round"]):
        if run["suite"] != suite or "error" in run:
            continue
        for case, samples in run["samples"].items():
            place = run["group"].split()[0 if suite == "collectives" else -1]
            facts: dict[str, float] = {k: run[k] for k in _FACTS if k in run}
            empty = Row(run["group"], case, place, run["n_ranks"], {}, facts)
            row = rows.setdefault((run["group"], case), empty)
            row.rounds.setdefault(run["system"], []).append(samples)
    return list(rows.values())


def systems_of(rows: Sequence[Row]) -> list[str]:
    """Return all systems, in the order in which they took turns."""
    return list(dict.fromkeys(system for row in rows for system in row.rounds))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    body = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in body) + "\n"


def milliseconds(seconds: Sequence[float]) -> str:
    """Return median and quartiles as text."""
    found = spread(seconds)
    return f"{1e3 * found.median:.3g} ({1e3 * found.low:.3g}..{1e3 * found.high:.3g})"


def _cell(row: Row, system: str) -> str:
    if system not in row.rounds:
        return "—"
    return milliseconds([s for one in row.rounds[system] for s in one])


def collectives_table(rows: Sequence[Row]) -> str:
    """Return durations in milliseconds, our bus bandwidth, and the ratio to each other system."""
    systems = systems_of(rows)
    others = [s for s in systems if s != "tfscale"]
    head = ["where", "bytes", *(f"{s} ms" for s in systems), "tfscale bus GB/s", "limit ms"]
    lines = []
    for row in rows:
        n_bytes = int(row.case)
        sent = 2 * (row.n_ranks - 1) / row.n_ranks * n_bytes
        rate = None if row.place == MEMORY else parse_rate(row.place)
        limit = "" if rate is None else f"{1e3 * physical_limit(0.0, sent, rate):.3g}"
        line = [row.group, f"{n_bytes:,}", *(_cell(row, s) for s in systems)]
        has_ours = "tfscale" in row.rounds
        bandwidth = bus_bandwidth(n_bytes, row.n_ranks, row.median_s("tfscale")) if has_ours else 0
        line += [f"{bandwidth / 1e9:.3g}", limit, *(ratio_text(row, o, "tfscale") for o in others)]
        lines.append(line)
    return table([*head, *(f"{o} / tfscale" for o in others)], lines)


def ratio_text(row: Row, baseline: str, ours: str) -> str:
    """Return how many times faster ours is, with the interval; empty where one is missing."""
    if baseline not in row.rounds or ours not in row.rounds:
        return "—"
    middle, low, high = paired_ratio(row.rounds[baseline], row.rounds[ours])
    interval = f" ({low:.2f}..{high:.2f})" if len(row.rounds[ours]) > 1 else ""
    return f"{middle:.2f}{interval}"


def step_limit(row: Row, which: str) -> float | None:
    """Return the physical limit of a step in seconds, or None where computing was not measured.

    Args:
        row: Of the step suite.
        which: "allreduce_bytes" or "least_bytes".
    """
    if "compute" not in row.rounds or which not in row.facts:
        return None
    rate = None if row.place == MEMORY else parse_rate(row.place)
    return physical_limit(row.median_s("compute"), row.facts[which], rate)


def step_table(rows: Sequence[Row]) -> str:
    """Return milliseconds per step, ratios to Horovod, and how close we come to the limit."""
    systems = systems_of(rows)
    ours = [s for s in systems if s.startswith("tfscale")]
    head = ["model and links", *(f"{s} ms" for s in systems), "limit of allreduce", "limit"]
    lines = []
    for row in rows:
        line = [row.group, *(_cell(row, s) for s in systems)]
        for which in ("allreduce_bytes", "least_bytes"):
            limit = step_limit(row, which)
            line.append("—" if limit is None else f"{1e3 * limit:.0f}")
        line += [ratio_text(row, "horovod", s) for s in ours]
        limit = step_limit(row, "least_bytes")
        line += [
            "—" if limit is None or s not in row.rounds else f"{limit / row.median_s(s):.0%}"
            for s in ours
        ]
        lines.append(line)
    ratios = [f"horovod / {s}" for s in ours]
    return table([*head, *ratios, *(f"{s} of limit" for s in ours)], lines)


def other_tables(runs: Runs) -> str:
    """Return memory per rank and start-up time, the medians over runs."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if run["suite"] == "step" and "error" not in run:
            lines.setdefault((run["group"], run["system"]), []).append(run)
    cells = [
        [
            group,
            system,
            f"{statistics.median(r['peak_bytes'] for r in found) / 2**20:.0f}",
            f"{statistics.median(r['start_s'] for r in found):.1f}",
        ]
        for (group, system), found in lines.items()
    ]
    return table(["model and links", "system", "MiB per rank", "s to the first step"], cells)


def report(content: dict[str, Any], title: str) -> str:
    """Return the page of one file of results."""
    machine, runs = content["machine"], content["runs"]
    failed = [f"{run['group']} {run['system']}" for run in runs if "error" in run]
    commits = sorted({str(run["commit"]) for run in runs})
    loads = [load for run in runs for load in run["load"]]
    about = (
        f"{machine['cpu']}, {machine['n_cores']} cores; {content['versions']['mpi']}; commit "
        f"{', '.join(commits)} (+: with changes); "
        f"{content['created']}; load {min(loads)} to {max(loads)}. Medians with quartiles in "
        "brackets; ratios with a paired 90 % interval over rounds.\n"
    )
    parts = [f"# {title}\n", about]
    collectives, steps = collect(runs, "collectives"), collect(runs, "step")
    if collectives:
        parts += ["## Allreduce\n", collectives_table(collectives)]
    if steps:
        parts += ["## Training steps\n", step_table(steps)]
        parts += ["## Memory and start\n", other_tables(runs)]
    if failed:
        parts += [f"Failed: {', '.join(sorted(set(failed)))}.\n"]
    return "\n".join(parts)


def main() -> None:
    """Write `benchmarks.md` and the pictures of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    options = parser.parse_args()
    content = json.loads(options.results.read_text())
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "benchmarks.md").write_text(report(content, "Benchmarks"))
    from benchmarks.pictures import draw_collectives, draw_steps

    draw_collectives(collect(content["runs"], "collectives"), options.output)
    draw_steps(collect(content["runs"], "step"), options.output)


if __name__ == "__main__":
    main()
