"""Going on after an interruption: one rank writes, all ranks restore."""

from __future__ import annotations

from typing import Any

import keras

from tfscale import objects, runtime
from tfscale.callbacks import backup_groups, backup_state, building, model_state, save_points
from tfscale.callbacks.checkpoint_restore import Restore
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.errors import ConfigError
from tfscale.fit.progress import progress_of


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` on any number of ranks.

    Rank 0 writes, reads and deletes the backup; the other ranks receive weights, optimizer state
    and the epoch from it, so only rank 0 needs the folder, and a run may go on with another number
    of ranks. Arguments are those of Keras. The model must be built.

    With `save_freq="epoch"` a backup is written when the next epoch begins: all callbacks have
    then ended theirs. Beside weights and optimizer it holds the states of callbacks such as
    `AdaptiveBatchSize`, and of the layers' random numbers (dropout), so that a run goes on bit by
    bit where operations are deterministic.

    Under local SGD rank 0 also writes each group's own model, optimizer state and place within the
    interval, when the first step of the next epoch begins; with `ParameterAveraging` those of each
    rank. The same number of ranks in the same groups goes on exactly there; others begin an
    interval with the average of the groups.

    Collective: all ranks must pass it to `fit`, at the same place, before other callbacks of
    tfscale. Keras's own would write and delete the same files on every rank.
    """

    model: Any
    _is_due = False
    _seeds: Any = ()
    _groups: Any = None  # what was read of local SGD, until it is restored
    _n_given_up = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore a backup, if there is one. Collective.

        Raises:
            ValueError: The model is not built.
            ExchangeError: Communication failed.
        """
        epoch = None
        # As they were made, before rank 0's are broadcast with the other variables.
        self._seeds = objects.allgather_object(self._own_seeds(), name="seeds")
        if runtime.rank() == 0:
            self.model._initial_epoch = None
            super().on_train_begin(logs)
            epoch = self.model._initial_epoch
        epoch = objects.broadcast_object(epoch, 0, name="epoch of the backup")
        self.model._initial_epoch = epoch
        self._is_due = False
        if epoch is not None:
            self._current_epoch = epoch  # for backups amid this epoch
            if not runtime.is_single():
                building.build_optimizer(self.model)
                slots = model_state.optimizer_variables(self.model)
                objects.broadcast_variables([*self.model.variables, *slots], 0)
                model_state.broadcast_loaded(self.model, 0)
            self._restore_states(epoch)
            if backup_groups.has_groups(self.model):
                self._groups = backup_groups.read_groups(self.backup_dir, epoch)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the backup of the epochs before, on rank 0; restore the groups of local SGD."""
        self._n_given_up = runtime.num_given_up()
        if self._groups is not None:
            self._restore_groups()
        if self._is_due and not backup_groups.has_groups(self.model):
            self._is_due = False
            self._save_model()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the backup of local SGD, now that groups have their own models again."""
        if self._is_due:
            self._is_due = False
            self._save_model()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Let a backup be written once all callbacks have ended the epoch."""
        self._current_epoch = epoch + 1
        self._last_batch_seen = 0
        self._is_due = self.save_freq == "epoch"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Delete the backup on rank 0, or write the last one that is to be kept."""
        # Of groups there is none: their models are averaged by now. Nor of an epoch that was cut by
        # another rank, which keeps no state for it.
        is_whole = self._is_due and runtime.num_given_up() == self._n_given_up
        if is_whole and not (self.delete_checkpoint or backup_groups.has_groups(self.model)):
            self._is_due = False
            self._write()
        self.model._initial_epoch = None  # for this fit only
        if runtime.rank() == 0:
            super().on_train_end(logs)

    def _save_model(self) -> None:
        if not backup_groups.has_groups(self.model):
            self._write()
            return
        is_given_up = runtime.num_given_up() > self._n_given_up
        if progress_of(self.model).is_over or is_given_up:
            return  # other ranks are not here
        backup_groups.write_groups(self.model, self.backup_dir, self._current_epoch)
        with backup_groups.averaged(self.model):
            self._write()

    def _write(self) -> None:
        if runtime.rank() == 0 and not save_points.is_given_up(self.model):
            drawn = [int(v.numpy()[1]) for v in backup_state.seeds_of(self.model)]
            states = [c.backup_state() for c in backup_state.resumable_callbacks()]
            own = {"seeds": self._seeds, "drawn": drawn, "callbacks": len(states)}
            # Before the weights: whatever epoch they say they belong to, its file is there.
            backup_state.write_state(self.backup_dir, self._current_epoch, [own, *states])
            super()._save_model()
            if not self.double_checkpoint:
                backup_state.remove_other_states(self.backup_dir, self._current_epoch)
                backup_groups.remove_other_groups(self.backup_dir, self._current_epoch)

    def _restore_groups(self) -> None:
        Restore(self.model, self._groups).run()
        self._groups = None

    def _own_seeds(self) -> list[int]:
        return [int(v.numpy()[0]) for v in backup_state.seeds_of(self.model)]

    def _restore_states(self, epoch: int) -> None:
        states: Any = None
        if runtime.rank() == 0:
            try:
                states = backup_state.read_state(self.backup_dir, epoch)
            except ConfigError as error:
                states = error
        states = objects.broadcast_object(states, 0, name="states of callbacks")
        if isinstance(states, ConfigError):
            raise states
        own, *of_callbacks = states
        callbacks = backup_state.resumable_callbacks()
        if len(callbacks) != own["callbacks"]:
            raise ConfigError(
                "A run goes on with the callbacks it began with. Received: "
                f"{[type(c).__name__ for c in callbacks]}; the backup has the states of "
                f"{own['callbacks']}. Pass the same callbacks, or remove the backup."
            )
        # Each rank's own seed, as the backup knows it; a rank that was not there keeps what it has.
        rank, known = runtime.rank(), own["seeds"]
        self._seeds = [*known, *self._seeds[len(known) :]][: runtime.size()]
        seeds = self._seeds[rank]
        backup_state.restore_seeds(backup_state.seeds_of(self.model), seeds, own["drawn"])
        for callback, state in zip(callbacks, of_callbacks, strict=True):
            callback.restore_state(state, epoch)


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
