"""Tables and pictures from results: `python -m benchmarks.report results.json --output folder`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import sessions
from benchmarks.cells import is_asleep
from benchmarks.gather_tables import gathers_of, gathers_table
from benchmarks.markdown import milliseconds, table
from benchmarks.rows import Row, Runs, collect, systems_of
from benchmarks.sleeping_tables import tables as sleeping_tables
from benchmarks.speedup_tables import speedup_table
from benchmarks.step_tables import group_table, overhead_table, summary

_HEADINGS = {
    "single": "One process",
    "report": "With and without a CommunicationReport, 2 ranks",
    "fit": "`fit`, and `train_on_batch` before it",
}
_MARK = "<!-- Below: made by `python -m benchmarks.report`. -->\n"


def _cell(row: Row, system: str) -> str:
    if system not in row.rounds:
        return "—"
    return milliseconds(row.samples(system))


def keras_table(rows: Sequence[Row]) -> str:
    """Return the steps of `fit` on both backends, medians with quartiles in brackets."""
    systems = systems_of(rows)
    lines = [[row.group, *(_cell(row, system) for system in systems)] for row in rows]
    return table(["model and links", *(f"{s.removeprefix('keras-')} ms" for s in systems)], lines)


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


def about(content: sessions.Content) -> str:
    """Return a line per session that has runs, and how to read the numbers."""
    runs = content["runs"]
    commits: dict[str, set[str]] = {}
    for run in runs:
        commits.setdefault(run["session"], set()).add(str(run["commit"]))
    described = content["sessions"]
    lines = [_session_line(described[name], sorted(found)) for name, found in commits.items()]
    loads = [load for run in runs for load in run["load"]]
    dirty = any("+" in commit for found in commits.values() for commit in found)
    reading = "With + there were changes since. " * dirty + (
        f"Load {min(loads)} to {max(loads)}. Medians with "
        "quartiles in brackets. Ratios are medians over the rounds in which both took turns, with "
        "the range of fewer than five rounds in brackets, with a 90 % interval from five on.\n"
    )
    return "\n".join([*dict.fromkeys(lines), "", reading])


def _session_line(session: dict[str, Any], commits: Sequence[str]) -> str:
    text = f"- commit {', '.join(commits)}: "
    if "machine" not in session:
        return f"{text}machine and versions were not recorded"
    machine, versions = session["machine"], session["versions"]
    text += f"{machine['cpu']}, {machine['n_cores']} cores; {versions['mpi']}; "
    return f"{text}TensorFlow {versions['tensorflow']}; {session['created']}"


def computed(content: dict[str, Any]) -> Runs:
    """Return the runs in which layers computed."""
    return [run for run in content["runs"] if not is_asleep(run["place"])]


def report(content: dict[str, Any], title: str) -> str:
    """Return the page of one file of results."""
    slept, runs = sleeping_tables(content["runs"]), computed(content)
    failed = [f"{run['group']} {run['system']}" for run in content["runs"] if "error" in run]
    parts = [f"# {title}\n"] if title else []
    parts += [about(content)]
    steps = collect(runs, "step")
    if steps:
        parts += ["## Training steps\n", "![ms per step](benchmarks-steps.png)\n", summary(steps)]
        parts += map(group_table, steps)
        parts += ["## Memory and start\n", other_tables(runs)]
    for suite, heading in _HEADINGS.items():
        if rows := collect(runs, suite):
            parts += [f"## {heading}\n", overhead_table(rows, suite)]
    if speedups := collect(runs, "speedup"):
        parts += ["## One process beside two ranks\n", speedup_table(speedups)]
    if gathers_of(runs):
        parts += ["## What hides the gather of parameters\n"]
        parts += ["![one step](benchmarks-gathers.png)\n"]
        parts += [gathers_table(runs)]
    if backends := collect(runs, "keras"):
        parts += ["## `fit` on TensorFlow and on PyTorch\n", keras_table(backends)]
    if slept:
        parts += ["## Where layers sleep\n", *slept]
    if failed:
        parts += [f"Failed: {', '.join(sorted(set(failed)))}.\n"]
    return "\n".join(parts)


def made_by(content: dict[str, Any], suite: str, slept: bool = False) -> str:
    """Return commits and machines of a suite's runs, for the foot of a picture."""
    runs = [
        run for run in content["runs"] if run["suite"] == suite and is_asleep(run["place"]) == slept
    ]
    machines = {
        f"{machine['cpu']}, {machine['n_cores']} cores"
        for machine in (content["sessions"][run["session"]]["machine"] for run in runs)
    }
    commits = sorted({run["commit"][:7] for run in runs})
    return f"commit {', '.join(commits)}; {'; '.join(sorted(machines))}"


def main() -> None:
    """Write `benchmarks-results.md` and its pictures; what stands above the mark in it is kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    options = parser.parse_args()
    content = sessions.read(options.results)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "benchmarks-results.md"
    above, mark, _ = (path.read_text() if path.exists() else "").partition(_MARK)
    page = above + mark + "\n" + report(content, "") if mark else report(content, "Benchmarks")
    path.write_text(page)
    from benchmarks.pictures import draw_gathers, draw_steps

    made = {suite: made_by(content, suite) for suite in ("step", "gathers")}
    runs = computed(content)
    steps = options.output / "benchmarks-steps.png"
    draw_steps(collect(runs, "step"), steps, f"{made['step']}; bars: quartiles")
    draw_gathers(runs, options.output, made["gathers"])


if __name__ == "__main__":
    main()
