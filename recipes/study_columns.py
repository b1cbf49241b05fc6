"""Columns that several studies of growing batches share, each computed from a run's epochs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Epochs = Sequence[Mapping[str, Any]]  # the lines of `metrics.jsonl`


def steps(samples: int) -> Callable[[Epochs], int]:
    """Return a column: the updates of a run with `samples` in an epoch."""
    return lambda epochs: sum(samples // int(e["batch_size"]) for e in epochs)


def share_at_largest(samples: int, largest: int) -> Callable[[Epochs], float]:
    """Return a column: the percentage of samples that were in batches of the largest size."""

    def share(epochs: Epochs) -> float:
        seen = [samples // int(e["batch_size"]) * e["batch_size"] for e in epochs]
        at_largest = [n for n, e in zip(seen, epochs, strict=True) if e["batch_size"] == largest]
        return 100 * sum(at_largest) / sum(seen)

    return share


def first_growth(epochs: Epochs) -> int | None:
    """Return the first epoch, from 1, with a larger batch than before; None if it never grows."""
    grown = (e["epoch"] for e in epochs if e["batch_size"] > epochs[0]["batch_size"])
    return next(grown, None)


def first_with(accuracy: float) -> Callable[[Epochs], int | None]:
    """Return a column: the first epoch, from 1, that ends with the accuracy; None without."""

    def epoch_of(epochs: Epochs) -> int | None:
        return next((e["epoch"] for e in epochs if e["val_accuracy"] >= accuracy), None)

    return epoch_of


def first_below(loss: float) -> Callable[[Epochs], int]:
    """Return a column: the first epoch, from 1, that ends with the validation loss; or one more."""

    def epoch_of(epochs: Epochs) -> int:
        reached = (e["epoch"] for e in epochs if e["val_loss"] <= loss)
        return next(reached, len(epochs) + 1)

    return epoch_of


def peak_update(epochs: Epochs) -> float:
    """Return the update in which theta was largest."""
    return float(epochs[-1]["theta_peak_update"])


def epochs_to_peak(samples: int) -> Callable[[Epochs], float]:
    """Return a column: the epochs, a fraction, until theta was largest, `samples` in each."""
    return lambda epochs: peak_update(epochs) / (samples // int(epochs[-1]["batch_size"]))
