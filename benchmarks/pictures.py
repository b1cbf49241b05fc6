"""Pictures of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.gather_tables import gathers_of
from benchmarks.kernel_times import BACKWARD, FORWARD
from benchmarks.numbers import Ratio, spread
from benchmarks.rows import Row, Runs, step_limit
from benchmarks.step_tables import TORCH_COMPUTE, name_of

_COLOURS = {"horovod": "tab:orange", "mwms": "tab:red", "mpi": "tab:brown"}
_TORCH_COLOUR = "tab:purple"
_PASS_COLOURS = {"gathers": "tab:green", FORWARD: "tab:blue", BACKWARD: "tab:orange"}
_PASS_ROWS = {
    "gathers": "gathers on the wire",
    FORWARD: "forward pass",
    BACKWARD: "back-propagation",
}


def draw_collectives(
    ratios: Mapping[str, Mapping[str, Sequence[tuple[int, Ratio]]]], path: Path, made: str
) -> None:
    """Draw how many times as long others take, by bytes, with intervals: a panel per place."""
    figure, axes = plt.subplots(
        1, len(ratios), figsize=(3.6 * len(ratios), 3.6), squeeze=False, sharey=True
    )
    labels_of_all = dict.fromkeys(label for lines in ratios.values() for label in lines)
    colours = {label: f"C{number}" for number, label in enumerate(labels_of_all)}
    for (place, lines), axis in zip(ratios.items(), axes[0], strict=True):
        for label, points in lines.items():
            sizes = [n_bytes for n_bytes, _ in points]
            colour = colours[label]
            axis.plot(sizes, [r.median for _, r in points], "o-", color=colour, label=label)
            ends = [r.low for _, r in points], [r.high for _, r in points]
            axis.fill_between(sizes, *ends, color=colour, alpha=0.2)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=place, xlabel="bytes", xscale="log", yscale="log")
        axis.grid(True, alpha=0.3)
    axes[0, 0].set_ylabel("their time / ours")
    named: dict[str, Any] = {}
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), named.keys(), ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )
    save(figure, path, made)


def draw_steps(rows: Sequence[Row], path: Path, made: str) -> None:
    """Draw the duration of a step, a panel per model and place, the physical limits as lines."""
    if not rows:
        return
    n_columns = 2 if len(rows) == 4 else min(3, len(rows))
    n_lines = -(-len(rows) // n_columns)
    size = (4.6 * n_columns, 2.9 * n_lines)
    figure, axes = plt.subplots(n_lines, n_columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    for axis, row in zip(axes.flat, rows, strict=False):
        _draw_panel(axis, row)
    labelled = [axis for axis in axes.flat if axis.get_legend_handles_labels()[1]]
    if labelled:  # the lines mean the same in all panels
        lines = labelled[0].get_legend_handles_labels()
        figure.legend(*lines, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, path, made)


def _draw_panel(axis: plt.Axes, row: Row) -> None:
    systems = list(row.rounds)
    colours = [colour_of(system) for system in systems]
    spreads = [spread(row.samples(system)) for system in systems]
    heights = [1e3 * one.median for one in spreads]
    low = [1e3 * (one.median - one.low) for one in spreads]
    high = [1e3 * (one.high - one.median) for one in spreads]
    names = [name_of(system) for system in systems]
    ends = {"xerr": [low, high], "error_kw": {"ecolor": "0.2", "lw": 1}}
    bars = axis.barh(names, heights, color=colours, **ends)
    axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    for which, style in (("allreduce_bytes", ":"), ("least_bytes", "-")):
        limit = step_limit(row, which)
        if limit is not None and row.where.rate_bits_s:
            label = {"allreduce_bytes": "limit, all gradients", "least_bytes": "limit"}[which]
            axis.axvline(1e3 * limit, color="black", linestyle=style, linewidth=1, label=label)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.tick_params(labelsize=7)
    # Of hosts with a rank each, where layers sleep.
    place = row.place.rpartition("@")[2] if row.where.sleep_speed else row.place
    axis.set_title(f"{row.case}, {place}, {row.n_ranks} ranks", fontsize=9)
    axis.set_xlabel("ms per step", fontsize=8)


def colour_of(system: str) -> str:
    """The colour of a system."""
    if system in ("compute", TORCH_COMPUTE):
        return "0.6"
    if system.startswith("ddp"):
        return _TORCH_COLOUR
    return _COLOURS.get(system, "tab:green")


def draw_gathers(runs: Runs, folder: Path, made: str) -> None:
    """Draw the last run's last step of rank 0: when gathers and kernels ran."""
    found = gathers_of(runs)
    if not found:
        return
    last = found[-1]
    figure, axis = plt.subplots(figsize=(9, 2.4))
    for height, name in enumerate(reversed(_PASS_ROWS)):
        spans = [(begin, end - begin) for begin, end in last["picture"][name]]
        axis.broken_barh(spans, (height - 0.4, 0.8), color=_PASS_COLOURS[name])
    axis.set_yticks(range(len(_PASS_ROWS)), [*reversed(_PASS_ROWS.values())])
    axis.set_xlabel("ms since the first gather of a step was sent")
    axis.set_title(f"{last['group']}, rank 0 of {last['n_ranks']}", fontsize=10)
    save(figure, folder / "benchmarks-gathers.png", made)


def save(figure: plt.Figure, path: Path, made: str) -> None:
    """Write a picture, with what it was made by at its foot."""
    figure.tight_layout()
    figure.text(0.5, 0.0, made, fontsize=7, color="0.4", ha="center", va="top")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
