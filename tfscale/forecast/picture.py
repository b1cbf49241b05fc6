"""The picture of a forecast: speedup and exposed communication over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfscale.forecast.curves import AUTO, Point

_MARKS = "osv^D*Px"


def draw(points: Sequence[Point], title: str, path: str | Path) -> None:
    """Write a PNG.

    Args:
        points: Of one model and machine.
        title: Above it.
        path: The file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6))
    for mark, (name, own) in zip(_MARKS, _by_exchange(points).items(), strict=False):
        ranks = [point.n_ranks for point in own]
        style = {
            "marker": mark,
            "label": name,
            "markersize": 5,
            "linewidth": 2.4 if name == AUTO else 1.2,
            "zorder": 3 if name == AUTO else 2,
        }
        left.plot(ranks, [point.speedup for point in own], **style)
        right.plot(ranks, [1e3 * point.predicted.exposed_s for point in own], **style)
    ranks = sorted({point.n_ranks for point in points})
    left.plot(ranks, ranks, color="0.7", linestyle="--", label="ideal", zorder=1)
    left.set(ylabel="speedup over one rank", yscale="log")
    right.set(ylabel="exposed communication, ms per step")
    right.set_yscale("symlog", linthresh=_least_exposed(points))
    for axes in (left, right):
        _finish(axes, ranks)
    left.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _by_exchange(points: Sequence[Point]) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(point.exchange, []).append(point)
    return curves


def _least_exposed(points: Sequence[Point]) -> float:
    """Return where the scale turns linear: a thousandth of the longest exposed time, in ms."""
    return max(1e3 * max(p.predicted.exposed_s for p in points) / 1e3, 1e-3)


def _finish(axes: Any, ranks: Sequence[int]) -> None:
    axes.set(xlabel="ranks", xscale="log")
    axes.set_xticks(ranks, [str(n) for n in ranks], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
