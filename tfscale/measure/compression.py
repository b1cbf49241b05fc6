"""Short trainings with several compressions: step time, bytes and a metric beside each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfscale.files import read_json_lines, write_findings
from tfscale.measure.report import FILE_NAME
from tfscale.plan.forecast import grid

_STEPS = {"step_s": ("ms per step", 1e3), "bytes": ("MB per step", 1e-6)}
_SHOWN = {**_STEPS, "value": ("", 1.0)}  # of a probe: title, and factor of the number


def read_steps(folder: Path) -> dict[str, float]:
    """Return medians over the second half of rank 0's steps in a `CommunicationReport`."""
    rows = [r for r in read_json_lines(folder / FILE_NAME) if r["kind"] == "step" and not r["rank"]]
    late = rows[len(rows) // 2 :] or [{"n_steps": 1}]
    found = {key: [row.get(key, math.nan) / row["n_steps"] for row in late] for key in _STEPS}
    return {key: statistics.median(values) for key, values in found.items()}


def write_report(probes: Sequence[dict[str, Any]], folder: str, made: Mapping[str, str]) -> str:
    """Return a table in Markdown; write `compression.json` and, with matplotlib, a picture.

    "lost" is a mean over seeds, each compared with the same seed of the first compression.
    """
    own: dict[str, list[dict[str, Any]]] = {}
    for probe in probes:
        own.setdefault(probe["compression"], []).append(probe)
    trained = {name: runs for name, runs in own.items() if "refused" not in runs[0]}
    metric = next(iter(trained.values()))[0]["metric"] if trained else ""
    base = {p["seed"]: p.get("value", math.nan) for p in own[probes[0]["compression"]]}
    sign = 1 if "loss" in metric or "error" in metric else -1
    rows, refused = (
        [],
        [f"{name}: {own[name][0]['refused']}" for name in own if name not in trained],
    )
    for name, runs in own.items():
        if name not in trained:
            rows.append([name, "refused", *[""] * 5])
            continue
        lost = [sign * (p["value"] - base[p["seed"]]) for p in runs]
        error = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else math.nan
        means = [
            scale * statistics.mean(p[key] for p in runs) for key, (_, scale) in _SHOWN.items()
        ]
        numbers = [f"{x:.4g}" for x in (*means, statistics.mean(lost), error)]
        rows.append([name, str(len(runs)), *numbers])
    titles = [title or metric for title, _ in _SHOWN.values()]
    head = ["compression", "seeds", *titles, "lost", "± standard error"]
    content = {"made": dict(made), "columns": head, "rows": rows, "probes": list(probes)}
    write_findings(folder, "compression", content, lambda path: _draw(trained, titles, path))
    return "\n".join([*grid(head, rows, ("compression",)), "", *refused, ""])


def _draw(trained: Mapping[str, Sequence[Any]], titles: Sequence[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 1.4 + 0.4 * len(trained)), layout="constrained")
    every = figure.subplots(1, len(titles), sharey=True)
    for axes, title, (key, (_, scale)) in zip(every, titles, _SHOWN.items(), strict=True):
        for at, runs in enumerate(trained.values()):
            own = [scale * p[key] for p in runs]
            axes.plot(own, [at] * len(own), "o", color=f"C{at}", alpha=0.5)
            axes.plot(statistics.mean(own), at, "|", ms=18, color="0.2")
        axes.set(yticks=range(len(trained)), yticklabels=list(trained), xlabel=title)
        axes.set_xlim(left=None if key == "value" else 0)
        axes.locator_params(axis="x", nbins=6)
        axes.grid(alpha=0.3)
    every[0].invert_yaxis()
    figure.suptitle("Each seed, and the mean", fontsize=10)
    figure.savefig(path, dpi=120)
