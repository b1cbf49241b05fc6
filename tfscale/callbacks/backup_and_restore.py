"""Going on after an interruption: one rank writes, all ranks restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from tfscale.callbacks import (
    backup_files,
    backup_groups,
    backup_state,
    model_state,
    save_points,
)
from tfscale.callbacks.backup_agreement import begin_together, read_together, require_order
from tfscale.callbacks.backup_files import Place
from tfscale.callbacks.checkpoint_callbacks import read_keras_callbacks, set_numbers
from tfscale.callbacks.checkpoint_restore import Restore
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.fit import adapted_layers
from tfscale.fit.agreement import compare_weights
from tfscale.fit.preparation import prepare
from tfscale.fit.progress import progress_of
from tfscale.optimizer.model_optimizers import accumulating


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` on any number of ranks.

    Rank 0 writes, reads and deletes the backup; the other ranks receive weights, optimizer state
    and the epoch from it, so only rank 0 needs the folder, and a run may go on with another number
    of ranks. Arguments are those of Keras. The model must be built.

    With `save_freq="epoch"` a backup is written when the next epoch begins: all callbacks have
    then ended theirs. Beside weights and optimizer it holds the states of callbacks such as
    `AdaptiveBatchSize`, of the layers' random numbers (dropout), and seed and epoch of
    `tfscale.data.GlobalBatches`, so that a run goes on bit by bit where operations are
    deterministic, also in a later `fit` on the same data. Not kept is a cycle of
    `backward_passes_per_step` that an epoch's end cuts: its batches are lost, and a log line says
    so (`Checkpoint` keeps it).

    Under local SGD rank 0 also writes each group's own model, optimizer state and place within the
    interval, when the first step of the next epoch begins; with `ParameterAveraging` those of each
    rank. The same number of ranks in the same groups goes on exactly there; others begin an
    interval with the average of the groups.

    Collective: all ranks must pass it to `fit`, at the same place, before other callbacks of
    tfscale and those with a state of their own. Keras's own would write and delete the same files
    on every rank.
    """

    model: Any
    _is_due = False
    _seeds: Any = ()
    _groups: Any = None  # what was read of local SGD, until it is restored
    _restored: Any = None  # until the first step begins
    _numbers: Any = None  # of Keras's callbacks, until all of them have begun training
    _n_given_up = 0

    def set_model(self, model: keras.Model) -> None:
        """Prepare the model; see `tfscale.prepare`."""
        super().set_model(model)
        prepare(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore a backup, if there is one. Collective.

        Raises:
            ConfigError: The model is not built, the backup cannot be read or does not fit, or a
                callback with a state stands before this one; on all ranks.
            ExchangeError: Communication failed.
        """
        self.model._initial_epoch = self._groups = self._restored = self._numbers = None
        self._is_due = False
        require_order(self, backup_groups.has_groups(self.model))
        has_backup = runtime.rank() == 0 and backup_files.may_exist(self._weights_path)
        # As they were made, before rank 0's are broadcast with the other variables.
        self._seeds = begin_together(self.model, self._own_seeds(), has_backup)
        place, states = read_together(lambda: self._load(logs), self.backup_dir)
        if place is None:
            compare_weights(self.model)
            return
        # `_current_epoch` is for backups amid this epoch.
        self.model._initial_epoch = self._current_epoch = place.epoch
        if not runtime.is_single():
            slots = model_state.optimizer_variables(self.model)
            objects.broadcast_variables([*self.model.variables, *slots], 0)
            model_state.broadcast_loaded(self.model, 0)
            adapted_layers.settle(self.model)
        self._restore_states(place.epoch, states)
        if backup_groups.has_groups(self.model):
            self._groups = backup_groups.read_groups(self.backup_dir, place)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the backup of the epochs before, on rank 0; restore what had to wait."""
        self._n_given_up = runtime.num_given_up()
        if self._numbers is not None:
            set_numbers(self._numbers, is_own=runtime.rank() == 0)
            self._numbers = None
        if self._groups is not None:
            self._restore_groups()
        if self._is_due and not backup_groups.has_groups(self.model):
            self._is_due = False
            self._save_model()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the backup of local SGD, now that groups have their own models again."""
        if self._restored is not None:
            self._restored.settle()
            self._restored = None
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
            self._write(is_end=True)
        self.model._initial_epoch = None  # for this fit only
        if runtime.rank() == 0:
            if self.delete_checkpoint:  # without them the rest is no backup, if killed now
                Path(self._weights_path).unlink(missing_ok=True)
            super().on_train_end(logs)

    def _save_model(self) -> None:
        if not backup_groups.has_groups(self.model):
            self._write()
            return
        is_given_up = runtime.num_given_up() > self._n_given_up
        if progress_of(self.model).is_over or is_given_up:
            return  # other ranks are not here
        backup_groups.write_groups(self.model, self.backup_dir, self._place())
        with backup_groups.averaged(self.model):
            self._write()

    def _place(self) -> Place:
        return Place(self._current_epoch, backup_files.iterations_of(self.model))

    def _write(self, is_end: bool = False) -> None:
        """Write on rank 0. The order matters, see `backup_files`."""
        if runtime.rank() > 0 or save_points.is_given_up(self.model):
            return
        place = self._place()
        drawn = [int(v.numpy()[1]) for v in backup_state.seeds_of(self.model)]
        states = [c.backup_state() for c in backup_state.resumable_callbacks()]
        own = {"seeds": self._seeds, "drawn": drawn, "callbacks": len(states)}
        own["keras_callbacks"] = read_keras_callbacks(is_end)
        own["data"] = backup_state.data_state()
        own["in_cycle"] = [o.n_accumulated for o in accumulating(self.model)]
        backup_state.write_state(self.backup_dir, place, [own, *states])
        if self.double_checkpoint:
            backup_files.copy_aside(self._weights_path, self._prev_weights_path)
            backup_files.copy_aside(self._training_metadata_path, self._prev_training_metadata_path)
        backup_files.write_weights(self.model.save_weights, self._weights_path)
        self._finish(place)

    def _finish(self, place: Place) -> None:
        """Do what comes after the weights, now or where a run was killed before it."""
        path = self._training_metadata_path
        if backup_files.read_metadata(path) != place:
            backup_files.write_metadata(path, place, self._last_batch_seen)
        before = backup_files.read_metadata(self._prev_training_metadata_path)
        keep = {place, before} if self.double_checkpoint and before else {place}
        backup_state.remove_other_states(self.backup_dir, keep)
        backup_groups.remove_other_groups(self.backup_dir, keep)
        backup_files.remove_leftovers(self.backup_dir)

    def _load(self, logs: dict[str, Any] | None) -> tuple[Place | None, Any]:
        if not backup_files.may_exist(self._weights_path):
            return None, None
        super().on_train_begin(logs)  # falls back to the weights before, with double_checkpoint
        told = backup_files.read_metadata(self._training_metadata_path)
        iterations = backup_files.iterations_of(self.model)
        place = backup_files.find_place(self.backup_dir, iterations, told)
        states = backup_state.read_state(self.backup_dir, place)
        self._finish(place)
        return place, states

    def _load_model(self) -> None:
        """Load weights; whose epoch they are is asked later, of all that is there."""
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self.model.load_weights(self._weights_path)

    def _restore_groups(self) -> None:
        self._restored = Restore(self.model, self._groups)
        self._restored.run()
        self._groups = None

    def _own_seeds(self) -> list[int]:
        return [int(v.numpy()[0]) for v in backup_state.seeds_of(self.model)]

    def _restore_states(self, epoch: int, states: Any) -> None:
        own, *of_callbacks = states
        callbacks = backup_state.resumable_callbacks()
        if len(callbacks) != own["callbacks"]:
            raise ConfigError(
                "A run goes on with the callbacks it began with. Received: "
                f"{[backup_state.kind_of(c) for c in callbacks]}; the backup has the states of "
                f"{own['callbacks']}. Pass the same callbacks, or remove the backup."
            )
        self._numbers = own.get("keras_callbacks", ())
        backup_state.restore_order(own.get("data"))
        if not backup_groups.has_groups(self.model):  # which keep sums, too
            backup_state.begin_cycles(self.model, own.get("in_cycle", ()))
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
