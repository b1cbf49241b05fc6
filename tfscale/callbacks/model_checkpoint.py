"""Checkpoints of which one rank writes one file."""

from __future__ import annotations

import functools
import os
from typing import Any

import keras

from tfscale.callbacks import save_points
from tfscale.comm import runtime
from tfscale.internals.keras import shown_to, wrap_saves


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` that writes on rank 0 only.

    Arguments are those of Keras. It may be given to `fit` on every rank or on rank 0 only. All
    ranks that have it make the same decisions, given logs equal on all ranks
    (`MetricAverageCallback` comes first), so `best` agrees everywhere.
    """

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        save = super()._save_model
        if runtime.rank() == 0:
            save(epoch, batch, logs)
        else:
            _decide(self, lambda: save(epoch, batch, logs))


class _NeverSaved:
    """Stands in for the model on ranks that decide but do not write."""

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    save_weights = save


def make_checkpoints_safe() -> None:
    """Let Keras's own callback keep to what the ranks agreed on, see `save_points`."""
    wrap_saves(_agreed)


def _agreed(save_model: Any) -> Any:
    @functools.wraps(save_model)
    def save_as_agreed(self: Any, epoch: int, batch: int | None, logs: Any) -> None:
        if save_points.is_given_up(self):
            return
        if save_points.is_silent(self):
            _decide(self, lambda: save_model(self, epoch, batch, logs))
            return
        folder = os.path.dirname(self.filepath)
        if folder and "{" not in folder and "://" not in folder:
            os.makedirs(folder, exist_ok=True)
        save_model(self, epoch, batch, logs)

    return save_as_agreed


def _decide(callback: Any, decide: Any) -> None:
    """Let a callback take its decision, and write and print nothing."""
    with shown_to(callback, _NeverSaved()):
        decide()
