"""Table and picture of R and step time by batch, k and f, from what the overlap suite measured.

python -m benchmarks.overlap_tables recipes/results/overlap_ratio.json recipes/results/overlap_ratio
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import sessions
from benchmarks.markdown import table
from benchmarks.overlap_cases import CENTRE, VARIED, Case, parse_case

_LABELS = {
    "batch": "Samples of a batch",
    "first_chunk": "k: layers with variables up to the first chunk's begin",
    "replicated": "f: replicated dense layers",
    "filters": "Filters of each convolution",
}
_SHORT = {"batch": "batch", "first_chunk": "k", "replicated": "f", "filters": "filters"}


@dataclass(frozen=True)
class Measured:
    """Quartiles (low, median, high) of a case: R in percent, milliseconds of a step."""

    ratio: tuple[float, float, float]
    step_ms: tuple[float, float, float]
    n_steps: int


def measured_of(runs: Sequence[dict[str, Any]]) -> dict[Case, Measured]:
    """Return the overlap ratio and step time of each case, over all runs.

    Of a step's R the mean over ranks is taken, of its time the slowest rank's.

    Args:
        runs: Of the overlap suite, for one model and place.
    """
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for run in runs:
        for name, by_rank in run["overlap_percent"].items():
            ratios.setdefault(name, []).extend(map(statistics.mean, zip(*by_rank, strict=True)))
            seconds.setdefault(name, []).extend(run["samples"][name])
    return {
        parse_case(name): Measured(
            _quartiles(ratios[name]),
            _quartiles([1e3 * value for value in seconds[name]]),
            len(seconds[name]),
        )
        for name in ratios
    }


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def along(found: dict[Case, Measured], name: str) -> list[tuple[int, Measured]]:
    """Return the cases that differ from the centre at most in one number, by that number."""
    others = [other for other in VARIED if other != name]
    cases = [
        case
        for case in found
        if all(getattr(case, other) == getattr(CENTRE, other) for other in others)
    ]
    points = [(getattr(case, name), found[case]) for case in cases]
    # The model's own filters, 0, are no number to put on an axis.
    return sorted(point for point in points if name != "filters" or point[0])


def _fixed(name: str) -> str:
    others = [other for other in VARIED if other not in (name, "filters")]
    return ", ".join(f"{_SHORT[other]} = {getattr(CENTRE, other)}" for other in others)


def lines_of(found: dict[Case, Measured]) -> str:
    """Return the table in Markdown."""
    rows = [
        [
            f"**{_SHORT[name]} = {value}**",
            _fixed(name),
            _shown(one.ratio),
            _shown(one.step_ms),
            str(one.n_steps),
        ]
        for name in VARIED
        for value, one in along(found, name)
    ]
    return table(["varied", "fixed", "R, %", "ms per step", "steps"], rows)


def _shown(quartiles: tuple[float, float, float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.0f} ({low:.0f}..{high:.0f})"


def draw(found: dict[Case, Measured], title: str, made: str, path: Path) -> None:
    """Draw R, and below it the time of a step, over batch, k and f."""
    figure = Figure(figsize=(15.0, 6.4), layout="constrained")
    panels: Any = figure.subplots(2, len(VARIED), squeeze=False)
    for column, name in enumerate(VARIED):
        points = along(found, name)
        for row, (field, label) in enumerate((("ratio", "R, %"), ("step_ms", "ms per step"))):
            axes, at = panels[row, column], [value for value, _ in points]
            low, middle, high = zip(*(getattr(one, field) for _, one in points), strict=True)
            below = [m - n for m, n in zip(middle, low, strict=True)]
            above = [n - m for m, n in zip(middle, high, strict=True)]
            axes.errorbar(at, middle, [below, above], fmt="o-", capsize=3, color=f"C{row}")
            if name in ("batch", "filters"):
                axes.set_xscale("log", base=2)
            axes.set_xticks(at, [str(value) for value in at])
            axes.minorticks_off()
            axes.set(xlabel=_LABELS[name], ylabel=label if column == 0 else "")
            # One scale for all R; widths differ too much in time for one.
            axes.set_ylim(0, 100 if field == "ratio" else 1.1 * max(high))
            axes.grid(alpha=0.3)
            if row == 0:
                axes.set_title(_fixed(name), fontsize=10)
    figure.suptitle(title)
    figure.supxlabel(made, fontsize=8, color="0.4")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of `python -m benchmarks overlap`")
    parser.add_argument("output", type=Path, help="path of .md and .png, without suffix")
    parser.add_argument("--note", default="", help="a sentence to put under the table")
    options = parser.parse_args()
    content = sessions.read(options.results)
    runs = [r for r in content["runs"] if r["suite"] == "overlap" and "error" not in r]
    # A group is "MODEL CASE PLACE".
    groups = sorted({" ".join(run["group"].split()[::2]) for run in runs})
    if len(groups) != 1:
        parser.error(f"results must be of one model at one place. Received: {groups}.")
    found = measured_of(runs)
    title = f"Overlap ratio R and step time under Chunked: {groups[0]}, {runs[0]['n_ranks']} ranks"
    made = [content["sessions"][name] for name in {run["session"] for run in runs}]
    machines = {f"{s['machine']['n_cores']} cores ({s['machine']['cpu']})" for s in made}
    commits = sorted({run["commit"][:7] for run in runs})
    note = f"commit {', '.join(commits)}; {'; '.join(sorted(machines))}"
    draw(found, f"{title} (medians and quartiles)", note, options.output.with_suffix(".png"))
    loads = [load for run in runs for load in run["load"]]
    text = [f"# {title}", "", f"![{title}]({options.output.name}.png)", "", lines_of(found), ""]
    text += ["Medians, with quartiles, over recorded steps: of R the mean over ranks, of the time"]
    text += ["the slowest rank's.", "", *([options.note, ""] if options.note else [])]
    text += [f"* Commit: {', '.join(commits)}", f"* Machine: {'; '.join(sorted(machines))}"]
    text += [f"* Load before and after: {', '.join(map(str, loads))}", "", "Made by:", "", "```"]
    commands = {f"{shlex.join(s['command'])} --output {options.results}" for s in made}
    text += sorted(commands)
    text += [f"python -m benchmarks.overlap_tables {options.results} {options.output}", "```"]
    options.output.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print(lines_of(found))


if __name__ == "__main__":
    main()
