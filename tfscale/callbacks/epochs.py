"""Callbacks that communicate when an epoch ends."""

from __future__ import annotations

import threading
from typing import Any

from tfscale.callbacks.base import Callback
from tfscale.comm import runtime
from tfscale.data.continued_epoch import steps_until
from tfscale.fit.progress import progress_of


class EpochCallback(Callback):
    """Knows the epochs that do not count.

    A rank on which training is stopped between two epochs leaves `fit` at once. The others notice
    in the first step of the next epoch and give it up, and Keras ends this epoch as any other.
    Nobody would answer them there, so nothing may be sent.

    Attributes:
        is_void: Whether the first step of this epoch was given up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_void = False
        self._n_batches = 0
        self._n_given_up = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Expect an epoch that counts."""
        super().on_epoch_begin(epoch, logs)
        self.is_void = False
        self._n_batches = 0
        self._n_given_up = runtime.num_given_up()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notice if the first step was given up."""
        super().on_train_batch_end(batch, logs)
        self._n_batches += 1
        if self._n_batches == 1:
            self.is_void = runtime.num_given_up() > self._n_given_up

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the last epoch: all ranks end training."""
        super().on_train_end(logs)
        self.is_void = False


class BeforeValidation(EpochCallback):
    """Acts once per epoch on all ranks: after the last batch, before `fit` validates.

    Where `fit` does not know the number of steps, or the epoch was cut short, it acts when
    validation begins or, without one, at the end of the epoch, before callbacks that come later
    save the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_acted = False
        self._open_epoch: int | None = None  # the one that has begun, and not ended

    def act(self) -> None:
        """Do what is due. Collective: all ranks must call this, in the same order."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Make the epoch due."""
        super().on_epoch_begin(epoch, logs)
        self._has_acted, self._open_epoch = False, epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Act after the last batch."""
        super().on_train_batch_end(batch, logs)
        steps = (self.params or {}).get("steps")
        # Where this step was given up, those who stopped act at the end of the epoch.
        is_told = runtime.num_given_up() > self._n_given_up
        is_last = steps is not None and steps_until(self.model, batch) >= int(steps)
        if is_last and not is_told and may_communicate():
            self._act_once()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Act before `fit` validates, if that has not happened in this epoch."""
        super().on_test_begin(logs)
        if self._open_epoch is not None and not self._has_acted:
            # Ranks that wait in a step must learn first that this one runs no more of them.
            progress_of(self.model).end_epoch(self._open_epoch)
            self._act_once()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Act, if that has not happened in this epoch."""
        super().on_epoch_end(epoch, logs)
        self._act_once()
        self._open_epoch = None

    def _act_once(self) -> None:
        if not self._has_acted and not self.is_void:
            self._has_acted = True
            self.act()


def may_communicate() -> bool:
    """Tell whether this is the main thread; hooks of batches may run on others."""
    return threading.current_thread() is threading.main_thread()
