"""Going on after an interruption: one rank writes, all ranks restore."""

from __future__ import annotations

from typing import Any

import keras

from tfscale import objects, runtime
from tfscale.callbacks import building
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.errors import ConfigError


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` on any number of ranks.

    Rank 0 writes, reads and deletes the backup; the other ranks receive weights, optimizer state
    and the epoch from it, so only rank 0 needs the folder, and a run may go on with another number
    of ranks. Arguments are those of Keras. The model must be built.

    Collective: all ranks must pass it to `fit`, at the same place, before other callbacks of
    tfscale. Keras's own would write and delete the same files on every rank.
    """

    model: Any

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore a backup, if there is one. Collective.

        Raises:
            ValueError: The model is not built.
            ExchangeError: Communication failed.
        """
        epoch = None
        if runtime.rank() == 0:
            self.model._initial_epoch = None
            super().on_train_begin(logs)
            epoch = self.model._initial_epoch
        epoch = objects.broadcast_object(epoch, 0, name="epoch of the backup")
        self.model._initial_epoch = epoch
        if epoch is not None and not runtime.is_single():
            building.build_optimizer(self.model)
            slots = self.model.optimizer.variables if self.model.optimizer else []
            objects.broadcast_variables([*self.model.variables, *slots], 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Delete the backup on rank 0."""
        if runtime.rank() == 0:
            super().on_train_end(logs)

    def _save_model(self) -> None:
        if runtime.rank() == 0:
            super()._save_model()


def refuse_plain_backup() -> None:
    """Raise where `fit` was given Keras's own callback on one of several ranks.

    Raises:
        ConfigError: It was.
    """
    for callback in callbacks_of_fit():
        if type(callback) is keras.callbacks.BackupAndRestore:
            raise ConfigError(
                "A backup must be written by one rank. Received: keras.callbacks.BackupAndRestore. "
                "Use tfscale.callbacks.BackupAndRestore on every rank, with the same arguments."
            )
