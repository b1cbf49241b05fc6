"""Report of recorded theta: where each rule finds an interval, and the curves over updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tfscale.files import has_matplotlib, read_json_lines
from tfscale.measure.growth import IntervalRule, Rule, find_interval
from tfscale.plan.forecast import grid

FILE_NAME = "theta.jsonl"
Row = dict[str, Any]


def peak_of(rows: Sequence[Row]) -> Row | None:
    """Return the record with the largest theta; None if there is none with a number."""
    finite = [row for row in rows if row["theta"] is not None and math.isfinite(row["theta"])]
    return max(finite, key=lambda row: row["theta"], default=None)


def write_report(directory: str | Path) -> str:
    """Write `theta.md` beside `theta.jsonl`, and `theta.png` with matplotlib; return the text."""
    folder = Path(directory)
    rows = read_json_lines(folder / FILE_NAME)
    text = _page(rows)
    (folder / "theta.md").write_text(text, encoding="utf-8")
    if has_matplotlib() and rows:
        _draw(rows, folder / "theta.png")
    return text


def _page(rows: Sequence[Row]) -> str:
    peak = peak_of(rows)
    lines = [
        "# Theta",
        "",
        f"{len(rows)} records up to update {rows[-1]['update'] if rows else 0}.",
    ]
    if peak is not None:
        where = f"Theta is largest, {peak['theta']:.4g}, at update {peak['update']}"
        if peak is rows[-1]:
            where += ", the last record: it has not peaked"
        elif peak is rows[0]:
            where += ", the first record: it falls from there on"
        lines += [f"{where} (epoch {peak['epoch'] + 1})."]
    ends = {row["epoch"]: row["theta"] for row in rows}  # the last record of each epoch
    thetas = [math.nan if theta is None else theta for theta in ends.values()]
    body = []
    for rule in get_args(Rule):
        findings = (
            find_interval(thetas[:n], IntervalRule(rule), min(ends))
            for n in range(1, len(thetas) + 1)
        )
        first = next((finding for finding in findings if finding is not None), None)
        shown = ("-", "not found") if first is None else (first.interval, first.reason)
        body.append([rule, *shown])
    lines += ["", "Intervals in epochs that the rules of `AdaptiveBatchSize` find:", ""]
    return "\n".join([*lines, *grid(["rule", "interval", "reason"], body, ("rule", "reason")), ""])


def _draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    shown = {
        "theta": "theta = (F_0 - F) / ||w_0 - w||",
        "loss": "F, mean loss since the last record",
        "distance": "||w_0 - w||",
        "gradient_norm": "||g||, mean gradient of a batch",
        "batch_size": "Samples of a batch",
    }
    counts = {name: len({row.get(name) for row in rows} - {None}) for name in shown}
    names = [name for name, n in counts.items() if n > (name == "batch_size")]
    figure = Figure(figsize=(3.6 * len(names), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        points = [(row["update"], row[name]) for row in rows if row.get(name) is not None]
        axes.plot(
            *zip(*points, strict=True), lw=1.2, drawstyle="steps-post" if "size" in name else None
        )
        axes.set(xlabel="Update", title=shown[name])
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
        peak = peak_of(rows)
        if name == "theta" and peak is not None:
            axes.axvline(peak["update"], color="0.6", ls=":")
    figure.savefig(path, dpi=120)
