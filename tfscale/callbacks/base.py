"""What all callbacks of tfscale do besides their own work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.callbacks import save_points
from tfscale.callbacks.finite_state import keep_finite
from tfscale.callbacks.model_checkpoint import make_checkpoints_safe
from tfscale.callbacks.stop_of_groups import put_off_stops
from tfscale.checkpoints.resumable import Resumable, resumables
from tfscale.comm import runtime
from tfscale.comm.eager import has_exchanged_gradients
from tfscale.config import ConfigError
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.data.own_metrics import warn_of_judges
from tfscale.data.step_count import StepCount
from tfscale.fit import cycles
from tfscale.fit.preparation import prepare
from tfscale.fit.progress import progress_of
from tfscale.fit.unsynchronised import require_averages, warn_if_unsynchronised


class Callback(keras.callbacks.Callback):
    """Prepares the model and keeps the ranks of a `fit` together.

    Subclasses that override a hook call the one here first. With several tfscale callbacks in a
    list the first one's hook counts, so their number is free; but every rank must have one.

    Attributes:
        compared: Names of attributes that must be equal on all ranks when training begins.
        companions: Callbacks inside of this one, whose hooks it calls.
    """

    compared: tuple[str, ...] = ()
    companions: Sequence[Any] = ()

    def set_model(self, model: keras.Model) -> None:
        """Prepare the model; see `tfscale.prepare` and `finite_state.keep_finite`."""
        super().set_model(model)
        prepare(model)
        keep_finite(model)
        if not runtime.is_single():
            make_checkpoints_safe()
        progress_of(model).expect_training()

    def resumables(self) -> list[Resumable]:
        """Return the callbacks whose states checkpoints keep: this one and companions."""
        own = [self] if isinstance(self, Resumable) else []
        return [*own, *resumables(self.companions)]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Agree on the number of steps and epochs, and on when to save. Collective.

        Raises:
            ConfigError: Keras's BackupAndRestore is among the callbacks of several ranks, or a
                callback does not go together with sharded parameters.
            ExchangeError: They differ between ranks.
        """
        if not runtime.is_single():
            _refuse_plain_backup()
        if progress_of(self.model).begin(self.params or {}):
            require_averages(self.model)
            save_points.agree(self.model)
            if cycles.may_end_early(self.model):
                put_off_stops(self.model)
            warn_if_unsynchronised(self.model)
            warn_of_judges()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that an epoch begins."""
        progress_of(self.model).begin_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell the other ranks that this one's epoch is over."""
        progress_of(self.model).end_epoch(epoch)
        warn_if_unsynchronised(self.model, has_exchanged_gradients())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Tell the other ranks that this one's `fit` is over."""
        progress_of(self.model).end_training()
        steps = (self.params or {}).get("steps")
        if isinstance(steps, StepCount):  # `History` has the same dict, which people write as JSON
            self.params["steps"] = int(steps)


def _refuse_plain_backup() -> None:
    for callback in callbacks_of_fit():
        if type(callback) is keras.callbacks.BackupAndRestore:
            raise ConfigError(
                "A backup must be written by one rank. Received: keras.callbacks.BackupAndRestore. "
                "Use tfscale.callbacks.BackupAndRestore on every rank, with the same arguments."
            )
