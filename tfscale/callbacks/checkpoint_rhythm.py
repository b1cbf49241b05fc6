"""When checkpoints are due."""

from __future__ import annotations

import time

from tfscale.config import ConfigError
from tfscale.data.slices import check_integer


class Rhythm:
    """Counts steps and epochs, which are equal on all ranks, and seconds, which are not."""

    def __init__(self, n_steps: int | None, n_epochs: int | None, seconds: float | None) -> None:
        """Choose; without any number a checkpoint is due after each epoch.

        Args:
            n_steps: Training steps between two, 1 or more.
            n_epochs: Epochs between two, 1 or more.
            seconds: Seconds between two, above 0.

        Raises:
            ConfigError: A number is out of its range.
        """
        if n_steps is None and n_epochs is None and seconds is None:
            n_epochs = 1
        self._n_steps = None if n_steps is None else check_integer("every_n_steps", n_steps, 1)
        self._n_epochs = None if n_epochs is None else check_integer("every_n_epochs", n_epochs, 1)
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"every_seconds must be above 0. Received: every_seconds={seconds}.")
        self._seconds = seconds
        self._start = time.monotonic()

    def start_clock(self) -> None:
        """Count seconds from now on."""
        self._start = time.monotonic()

    def is_due_after_steps(self, before: int, after: int) -> bool:
        """Return whether a multiple of the steps was reached.

        Args:
            before: Steps of the run before those that have ended.
            after: And with them.
        """
        return self._n_steps is not None and after // self._n_steps > before // self._n_steps

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Return whether this was the last of so many epochs.

        Args:
            epoch: Counted from 0.
        """
        return self._n_epochs is not None and (epoch + 1) % self._n_epochs == 0

    def is_time(self) -> bool:
        """Return whether the seconds are over on this rank."""
        return self._seconds is not None and time.monotonic() - self._start >= self._seconds
