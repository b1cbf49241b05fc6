"""Pictures of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.numbers import bus_bandwidth
from benchmarks.report import Row, step_limit, systems_of


def draw_collectives(rows: Sequence[Row], folder: Path) -> None:
    """Draw bus bandwidth over bytes, a panel per place and number of ranks."""
    groups = list(dict.fromkeys(row.group for row in rows))
    if not groups:
        return
    figure, axes = plt.subplots(1, len(groups), figsize=(5 * len(groups), 4), squeeze=False)
    for group, axis in zip(groups, axes[0], strict=True):
        chosen = [row for row in rows if row.group == group]
        for system in systems_of(chosen):
            points = [
                (int(r.case), bus_bandwidth(int(r.case), r.n_ranks, r.median_s(system)) / 1e9)
                for r in chosen
                if system in r.rounds
            ]
            axis.loglog(*zip(*points, strict=True), marker="o", label=system)
        axis.set(title=group, xlabel="bytes", ylabel="bus bandwidth, GB/s")
        axis.grid(True, alpha=0.3)
        axis.legend()
    _save(figure, folder / "allreduce.png")


def draw_steps(rows: Sequence[Row], folder: Path) -> None:
    """Draw the duration of a step per model and system, with the physical limits as lines."""
    if not rows:
        return
    systems = systems_of(rows)
    width = 0.8 / len(systems)
    figure, axis = plt.subplots(figsize=(max(6.0, 1.6 * len(rows)), 4.5))
    for number, system in enumerate(systems):
        left = (number + 0.5) * width - 0.4
        places = [i + left for i, row in enumerate(rows) if system in row.rounds]
        heights = [1e3 * row.median_s(system) for row in rows if system in row.rounds]
        axis.bar(places, heights, width, label=system)
    for which, style in (("allreduce_bytes", "--"), ("least_bytes", "-")):
        for i, row in enumerate(rows):
            limit = step_limit(row, which)
            if limit is not None:
                label = f"limit, {which.replace('_', ' ')}" if i == 0 else None
                axis.hlines(1e3 * limit, i - 0.45, i + 0.45, "black", style, label=label)
    axis.set_xticks(range(len(rows)), [row.group for row in rows], rotation=20)
    axis.set_ylabel("ms per step")
    axis.legend()
    _save(figure, folder / "steps.png")


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
