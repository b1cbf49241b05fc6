"""Pictures of a run. Drawn without pyplot, so they need no display and keep no global state."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from metrics import psnr

_LABELS = {"loss": "Loss", "psnr": "PSNR (dB)", "accuracy": "Accuracy"}


class Restoration(NamedTuple):
    """One picture, three times, each (rows, columns, 1) with grey values in [0, 1]."""

    corrupted: np.ndarray
    restored: np.ndarray
    truth: np.ndarray


@contextlib.contextmanager
def failure_is_a_warning(path: Path) -> Iterator[None]:
    """Log a failure to draw: a run is not lost for a picture.

    Args:
        path: File that would have been written.
    """
    try:
        yield
    except Exception as error:  # whatever it is, the numbers are in the other files
        logging.warning("%s was not drawn: %s: %s.", path, type(error).__name__, error)


def learning_curve(
    lines: Sequence[Mapping[str, float]], path: Path, baselines: Mapping[str, float] | None = None
) -> None:
    """Draw every metric against the epoch, training and validation together.

    Args:
        lines: One per epoch, with `epoch` and, for a metric m, `m` and perhaps `val_m`. An epoch
            without a metric leaves a gap: some are not measured in every epoch.
        path: PNG file to write.
        baselines: Value of the metric m to draw as a dotted line: what it is without training.
    """
    others = {"epoch", "seconds", "train_seconds", "learning_rate", "batch_size"}
    names = dict.fromkeys(name for line in lines for name in line)
    metrics = [m for m in names if m not in others and not m.startswith("val_")]
    metrics.sort(key=lambda m: (m != "loss", m))
    figure = Figure(figsize=(5.2 * len(metrics), 3.8), layout="constrained")
    all_axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    epochs = [line["epoch"] for line in lines]
    for axes, metric in zip(all_axes, metrics, strict=True):
        for name, label, marker in (
            (metric, "training", "o"),
            (f"val_{metric}", "validation", "s"),
        ):
            if name in names:
                values = [line.get(name, np.nan) for line in lines]
                axes.plot(epochs, values, marker, ls="-", ms=4, label=label)
        if metric in (baselines or {}):
            value = (baselines or {})[metric]
            axes.axhline(value, color="0.4", ls=":", label=f"corrupted input ({value:.1f})")
        _finish(axes, metric)
    figure.suptitle(f"{path.parent.name}: {lines[-1]['seconds']:.0f} s, with validation")
    figure.savefig(path, dpi=120)


def _finish(axes: Axes, metric: str) -> None:
    axes.set_xlabel("Epoch")
    axes.set_ylabel(_LABELS.get(metric, metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if metric == "loss":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend()


def restorations(rows: Sequence[Restoration], path: Path) -> None:
    """Draw one row per picture: corrupted input, restored, truth, and what is still wrong.

    The PSNR in the titles is that of what is shown.

    Args:
        rows: The patches to show, at least one.
        path: PNG file to write.
    """
    figure = Figure(figsize=(11.0, 2.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 4, squeeze=False)
    for axes_row, row in zip(grid, rows, strict=True):
        stack = np.stack([row.corrupted, row.restored])
        corrupted_db, restored_db = psnr(np.stack([row.truth, row.truth]), stack)
        error = np.abs(np.clip(row.restored, 0.0, 1.0) - row.truth)
        shown = (
            (f"Input, {float(corrupted_db):.2f} dB", row.corrupted, 1.0),
            (f"Restored, {float(restored_db):.2f} dB", row.restored, 1.0),
            ("Truth", row.truth, 1.0),
            ("|restored - truth|, 5 times brighter", error, 0.2),
        )
        for axes, (title, picture, white) in zip(axes_row, shown, strict=True):
            axes.imshow(picture, cmap="gray", vmin=0.0, vmax=white, interpolation="nearest")
            axes.set_title(title, fontsize=10)
            axes.set_axis_off()
    figure.savefig(path, dpi=120)
