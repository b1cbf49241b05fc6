"""The picture of a study: the metric against epochs and time, speedups, where the time goes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import study_report
from study_runs import Outcome, Study

_LINES = ("-", "--", ":", "-.")  # another one after every ten configurations, as colours repeat


def draw(study: Study, outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a PNG file.

    Args:
        study: The study.
        outcomes: Of its finished runs, at least one.
        path: File to write.
    """
    figure = Figure(figsize=(11.0, 8.0), layout="constrained")
    (by_epoch, by_time), (speedups, times) = figure.subplots(2, 2)
    names = [s.name for s in study_report.summaries(study, outcomes)]
    for number, name in enumerate(names):
        own = [outcome for outcome in outcomes if outcome.run.configuration == name]
        _curve(by_epoch, study.metric, own, number, is_by_time=False)
        _curve(by_time, study.metric, own, number, is_by_time=True)
    by_epoch.set_xlabel("Epoch")
    by_time.set_xlabel("Seconds of training, without validation")
    for axes in (by_epoch, by_time):
        axes.set_ylabel(study.metric)
        axes.grid(alpha=0.3)
    by_epoch.legend(fontsize=8)
    _speedups(speedups, study, outcomes)
    _times(times, study, outcomes)
    figure.suptitle(study.title)
    figure.savefig(path, dpi=110)


def _curve(
    axes: Axes, metric: str, own: Sequence[Outcome], number: int, *, is_by_time: bool
) -> None:
    """Draw the mean over seeds, and a band from the lowest to the highest."""
    colour, dashes = f"C{number % 10}", _LINES[number // 10 % len(_LINES)]
    count = min(len(outcome.epochs) for outcome in own)
    values = np.array([[line[metric] for line in o.epochs[:count]] for o in own])
    seconds = np.array([[line["train_seconds"] for line in o.epochs[:count]] for o in own])
    at = np.cumsum(seconds, axis=1).mean(axis=0) if is_by_time else np.arange(1, count + 1)
    label = own[0].run.configuration
    mean = values.mean(axis=0)
    axes.plot(at, mean, color=colour, ls=dashes, marker="o", ms=2.5, lw=1.3, label=label)
    if len(own) > 1:
        axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15)


def _speedups(axes: Axes, study: Study, outcomes: Sequence[Outcome]) -> None:
    rows = study_report.summaries(study, outcomes)
    pairs = [("epoch", [study_report.speedup(rows[0].epoch_s, row.epoch_s) for row in rows])]
    if study.threshold:
        base = rows[0].seconds_to_threshold
        total = [study_report.speedup(base, row.seconds_to_threshold) for row in rows]
        pairs.append((f"total, to {study.threshold[0]} {study.threshold[1]:g}", total))
    height = 0.8 / len(pairs)
    for number, (label, values) in enumerate(pairs):
        at = np.arange(len(rows)) + (number - (len(pairs) - 1) / 2) * height
        bars = axes.barh(at, [value or 0.0 for value in values], height * 0.92, label=label)
        shown = ["not reached" if value is None else f"{value:.2f}" for value in values]
        axes.bar_label(bars, shown, fontsize=8, padding=2)
    _names(axes, [row.name for row in rows])
    axes.set_xlabel(f"Speedup over {rows[0].name}")


def _times(axes: Axes, study: Study, outcomes: Sequence[Outcome]) -> None:
    rows = study_report.summaries(study, outcomes)
    waiting = np.array([row.epoch_s * (row.exposed_share or 0.0) for row in rows])
    computing = np.array([row.epoch_s for row in rows]) - waiting
    at = range(len(rows))
    axes.barh(at, computing, 0.6, label="compute and input")
    axes.barh(at, waiting, 0.6, left=computing, label="waiting for communication", color="C3")
    _names(axes, [row.name for row in rows])
    axes.set_xlabel("Seconds of training per epoch")


def _names(axes: Axes, names: Sequence[str]) -> None:
    """Write the configurations beside their bars, the first on top, and a legend above."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
