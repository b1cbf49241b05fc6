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

_STEPS = {"ms per step": ("step_s", 1e3), "MB per step": ("bytes", 1e-6)}


def read_steps(folder: Path) -> dict[str, float]:
    """Return medians over the second half of rank 0's steps in a `CommunicationReport`."""
    rows = [r for r in read_json_lines(folder / FILE_NAME) if r["kind"] == "step" and not r["rank"]]
    late = rows[len(rows) // 2 :] or [{"n_steps": 1}]
    return {
        title: statistics.median(factor * row.get(key, math.nan) / row["n_steps"] for row in late)
        for title, (key, factor) in _STEPS.items()
    }


# Parts of names of metrics that are better the lower they are, those of users included.
_LOWER_IS_BETTER = (
    *("loss", "error", "hinge", "poisson", "divergence", "entropy", "perplexity"),
    *("mae", "mse", "rmse", "mape", "msle", "cosh"),
)


def write_report(probes: Sequence[dict[str, Any]], folder: str, made: Mapping[str, str]) -> str:
    """Return a table in Markdown; write `compression.json` and, with matplotlib, a picture.

    "lost" is a mean over seeds, each compared with the same seed of the first compression.
    """
    runs_of: dict[str, list[dict[str, Any]]] = {}
    for probe in probes:
        runs_of.setdefault(probe["compression"], []).append(probe)
    refused = [p for p in probes if "refused" in p]
    trained = {name: runs for name, runs in runs_of.items() if runs[0] not in refused}
    metric = next((p["metric"] for p in probes if p not in refused), "")
    base = {p["seed"]: p.get("value", math.nan) for p in runs_of[probes[0]["compression"]]}
    sign = 1 if any(word in metric.lower() for word in _LOWER_IS_BETTER) else -1
    rows = {name: ["refused", *[""] * 5] for name in runs_of}
    for name, runs in trained.items():
        lost = [sign * (p["value"] - base.get(p["seed"], math.nan)) for p in runs]
        is_known = len(lost) > 1 and all(map(math.isfinite, lost))
        error = statistics.stdev(lost) / len(lost) ** 0.5 if is_known else math.nan
        means = [f"{statistics.mean(p[key] for p in runs):.4g}" for key in (*_STEPS, "value")]
        rows[name] = [str(len(runs)), *means, f"{statistics.mean(lost):.4f}", f"{error:.4f}"]
    head = ["compression", "seeds", *_STEPS, metric, "lost", "± standard error"]
    table = grid(head, [[name, *row] for name, row in rows.items()], ("compression",))
    content = {"made": dict(made), "table": table, "probes": list(probes)}
    write_findings(folder, "compression", content, lambda path: _draw(trained, metric, path))
    return "\n".join([*table, "", *(f"{p['compression']}: {p['refused']}" for p in refused), ""])


def _draw(trained: Mapping[str, Sequence[Any]], metric: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 1.4 + 0.4 * len(trained)), layout="constrained")
    panels = figure.subplots(1, len(_STEPS) + 1, sharey=True)
    for axes, key in zip(panels, (*_STEPS, "value"), strict=True):
        for at, runs in enumerate(trained.values()):
            values = [p[key] for p in runs]
            axes.plot(values, [at] * len(values), "o", color=f"C{at}", alpha=0.5)
            axes.plot(statistics.mean(values), at, "|", ms=18, color="0.2")
        axes.set(yticks=range(len(trained)), yticklabels=list(trained))
        axes.set(xlabel=key if key in _STEPS else metric, xlim=(0 if key in _STEPS else None, None))
        axes.locator_params(axis="x", nbins=6)
        axes.grid(alpha=0.3)
    panels[0].invert_yaxis()
    figure.suptitle("Each seed, and the mean", fontsize=10)
    figure.savefig(path, dpi=120)
