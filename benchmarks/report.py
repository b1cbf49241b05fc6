"""Tables and pictures from results: `python -m benchmarks.report results.json --output folder`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.numbers import bus_bandwidth, physical_limit
from benchmarks.rows import MEMORY, Row, Runs, collect, systems_of
from benchmarks.step_tables import group_table, overhead_table, summary
from benchmarks.text import milliseconds, ratio_text, table
from tfscale.cluster.layout import parse_rate

_HEADINGS = {"single": "One process", "report": "With and without a CommunicationReport, 2 ranks"}
_MARK = "<!-- Below: made by `python -m benchmarks.report`. -->\n"


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
    parts = [f"# {title}\n"] if title else []
    parts += [about]
    steps = collect(runs, "step")
    collectives = collect(runs, "collectives")
    if steps:
        parts += ["## Training steps\n", "![ms per step](benchmarks-steps.png)\n", summary(steps)]
        parts += map(group_table, steps)
        parts += ["## Memory and start\n", other_tables(runs)]
    for suite, heading in _HEADINGS.items():
        if rows := collect(runs, suite):
            parts += [f"## {heading}\n", overhead_table(rows, suite)]
    if collectives:
        parts += ["## Allreduce\n", "![bus bandwidth](benchmarks-allreduce.png)\n"]
        parts += [collectives_table(collectives)]
    if failed:
        parts += [f"Failed: {', '.join(sorted(set(failed)))}.\n"]
    return "\n".join(parts)


def main() -> None:
    """Write `benchmarks.md` and its pictures; what stands above the mark in it is kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    options = parser.parse_args()
    content = json.loads(options.results.read_text())
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "benchmarks.md"
    above, mark, _ = (path.read_text() if path.exists() else "").partition(_MARK)
    page = above + mark + "\n" + report(content, "") if mark else report(content, "Benchmarks")
    path.write_text(page)
    from benchmarks.pictures import draw_collectives, draw_steps

    draw_collectives(collect(content["runs"], "collectives"), options.output)
    draw_steps(collect(content["runs"], "step"), options.output)


if __name__ == "__main__":
    main()
