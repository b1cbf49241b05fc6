"""Speedup over one process: `python -m benchmarks.scaling runs.json --output docs`.

Runs are those of places where layers sleep. One process trains as many samples per second as a rank
that only computes. **Weak** scaling has the same samples on each rank:
`--places sleep-2x1@1gbit sleep-4x1@1gbit sleep-8x1@1gbit`. **Strong** scaling shares a batch: at
`sleep0.5-8x1@1gbit` a rank has 16 samples, and at `sleep-16x1@1gbit` 8.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import layer_tables, sessions
from benchmarks.cells import COMPUTE_ONLY
from benchmarks.markdown import table
from benchmarks.places import parse_place
from benchmarks.report import made_by
from benchmarks.rows import Runs
from benchmarks.sleeping_tables import groups_of, limit_s, samples_of
from benchmarks.step_tables import compute_of, name_of

_LIMIT = "limit"
_LINES = {"tfscale-allreduce": "--", "tfscale-sharded-int8": "-."}


@dataclass(frozen=True)
class Series:
    """Speedups of the same model on several numbers of ranks.

    Attributes:
        title: Model, link, and what stays the same.
        speedups: By system, over one process, by number of ranks.
    """

    title: str
    speedups: dict[str, dict[int, float]]


def series_of(runs: Runs) -> list[Series]:
    """The series of at least two numbers of ranks among runs, weak ones first."""
    found: dict[tuple[int, str], dict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for group, systems in groups_of(runs).items():
        model, text = group.split()
        place = parse_place(text)
        if place.n_hosts != place.n_ranks or place.sleep_speed is None:
            continue
        link = text.rpartition("@")[2]
        n_samples = layer_tables.read()[model]["samples"] / place.sleep_speed
        weak = (0, f"{model}, {link}, {n_samples:g} samples on each rank")
        strong = (1, f"{model}, {link}, {n_samples * place.n_ranks:g} samples on all ranks")
        seconds = {system: statistics.median(samples_of(of)) for system, of in systems.items()}
        for system, step_s in seconds.items():
            compute_s = seconds.get(compute_of(system))
            if compute_s is None or system in (*COMPUTE_ONLY, "tcp"):
                continue
            values = {system: place.n_ranks * compute_s / step_s}
            if "tcp" in seconds:
                least_s = limit_s("", seconds["compute"], seconds["tcp"], model)
                values[_LIMIT] = place.n_ranks * seconds["compute"] / least_s
            for key in (weak, strong):
                for name, speedup in values.items():
                    found[key][name][place.n_ranks] = speedup
    return [
        Series(title, dict(speedups))
        for (_, title), speedups in sorted(found.items())
        if len({n for values in speedups.values() for n in values}) > 1
    ]


def series_table(series: Series) -> str:
    """A line per system: speedup over one process, and in brackets its share of the ranks."""
    ranks = sorted({n for values in series.speedups.values() for n in values})
    lines = [
        [name_of(system), *(_cell(values, n) for n in ranks)]
        for system, values in series.speedups.items()
    ]
    head = ["speedup over one process", *(f"{n} ranks" for n in ranks)]
    return f"### {series.title}\n\n{table(head, lines)}"


def _cell(values: dict[int, float], n_ranks: int) -> str:
    return f"{values[n_ranks]:.2f} ({values[n_ranks] / n_ranks:.2f})" if n_ranks in values else ""


def draw(listed: list[Series], path: Path, made: str) -> None:
    """Draw a panel per series: the speedup's share of the number of ranks, and the limit's."""
    from benchmarks.pictures import colour_of, plt, save

    figure, axes = plt.subplots(1, len(listed), figsize=(5 * len(listed), 4), squeeze=False)
    for series, axis in zip(listed, axes[0], strict=True):
        ranks = sorted({n for values in series.speedups.values() for n in values})
        for system, values in series.speedups.items():
            if len(values) == 1:
                continue  # no line
            shares = [(n, speedup / n) for n, speedup in sorted(values.items())]
            style = {"color": "black", "linestyle": ":"}
            if system != _LIMIT:
                marker = "s" if system == "ddp-fsdp" else "o"
                style = {"color": colour_of(system), "marker": marker}
                style["linestyle"] = _LINES.get(system, "-")
            axis.plot(*zip(*shares, strict=True), label=name_of(system), **style)
        axis.set(xscale="log", xlabel="ranks", ylabel="speedup over one process / ranks")
        axis.set_ylim(0, 1.05)
        axis.xaxis.set_ticks(ranks, [str(n) for n in ranks])
        axis.xaxis.set_minor_locator(plt.NullLocator())
        axis.set_title(series.title, fontsize=9)
        axis.grid(alpha=0.3)
    named: dict[str, Any] = {}
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    figure.legend(named.values(), named.keys(), fontsize=8, ncols=4, **place)
    save(figure, path, made)


def main() -> None:
    """Print the tables, and draw `benchmarks-scaling.png`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the picture")
    options = parser.parse_args()
    content = sessions.read(options.results)
    listed = series_of(content["runs"])
    if not listed:
        parser.error(
            "results must have runs of one model on two or more numbers of ranks, with computing "
            f"alone, where layers sleep. Received: {options.results}."
        )
    print("\n".join(map(series_table, listed)))
    draw(listed, options.output / "benchmarks-scaling.png", made_by(content, "step", slept=True))


if __name__ == "__main__":
    main()
