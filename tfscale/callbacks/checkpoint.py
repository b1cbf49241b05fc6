"""Save the complete state of a run periodically, and resume it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfscale.callbacks.base import Callback
from tfscale.checkpoints import preemption, resumable
from tfscale.checkpoints.files import delete_all
from tfscale.checkpoints.saver import Saver, Schedule, agree_on_end
from tfscale.checkpoints.snapshot_restore import Position, Reader, Restore, is_broken, take_snapshot
from tfscale.checkpoints.variables import group_of
from tfscale.comm import objects, runtime
from tfscale.config import PREEMPTED, ConfigError, check_integer, require
from tfscale.data.dataset_batches import DatasetBatches
from tfscale.data.global_batches import GlobalBatches, continue_epoch, restore_data
from tfscale.fit.preparation import build_model
from tfscale.fit.session import running_session
from tfscale.internals.keras import begin_at_epoch, how_to_build, is_built, steps_until
from tfscale.internals.traits import Phase

logger = logging.getLogger("tfscale")


class Checkpoint(Callback):
    """Save the complete state of a run periodically, and resume from the newest checkpoint.

    Each rank copies its part between two steps and writes it while training continues. Values that
    are equal on all ranks, such as weights, are written by the first rank that has them; shards of
    the optimizer's state, moving statistics, and states of metrics and of random numbers by every
    rank. When `fit` begins, the newest checkpoint that all ranks can read is restored, also in the
    middle of an epoch; damaged ones are skipped. 'Checkpoints' in the documentation lists the state
    that a resumed run has in common with an uninterrupted one.

    SIGTERM on any rank, or `tfscale.preemption.request_save_and_stop()`, saves and ends all ranks
    with exit code 75 (`tfscale.exit_codes.PREEMPTED`): start the job again to resume.

    Collective: all ranks must pass it to `fit`. A directory belongs to one `fit` of a program.

    Args:
        directory: Folder on a file system that all ranks share, unless `shared` is False; created
            if need be.
        every_n_steps: Training steps between two checkpoints.
        every_n_epochs: Epochs between two checkpoints; 1 if no other interval is given.
        every_seconds: Seconds between two checkpoints, checked about once a second.
        keep: Number of finished checkpoints to keep, 1 or more; there is one more during a write.
        asynchronous: Write on a thread. With False training waits for the files.
        shared: False sends the parts of all ranks to rank 0, which writes and reads them for all,
            so that no other rank needs the directory. For small models.

    Raises:
        ConfigError: An argument does not fit. When training begins: ranks do not share the
            directory, all checkpoints in it are damaged or belong to another model, or there is
            another such callback.
        ExchangeError: A rank could not write its part, on all ranks; earlier checkpoints stay.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> checkpoint = tfscale.callbacks.Checkpoint("run")
        >>> data = tfscale.data.GlobalBatches(np.zeros((4, 3)), np.ones((4, 1)), batch_size=2)
        >>> history = model.fit(data, epochs=3, callbacks=[checkpoint], verbose=0)
        >>> history = model.fit(data, epochs=5, callbacks=[checkpoint], verbose=0)  # resumes
        >>> history.epoch
        [3, 4]
    """

    phase = Phase.RESTORE

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every_n_steps: int | None = None,
        *,
        every_n_epochs: int | None = None,
        every_seconds: float | None = None,
        keep: int = 3,
        asynchronous: bool = True,
        shared: bool = True,
    ) -> None:
        super().__init__()
        self.directory, self.shared = Path(os.path.abspath(directory)), shared
        self._schedule = Schedule(every_n_steps, every_n_epochs, every_seconds)
        self._saver = Saver(self.directory, check_integer("keep", keep, 1), shared, asynchronous)
        self._handler = preemption.TermHandler(self._is_running)
        self._restart()

    def _is_running(self) -> bool:
        session = running_session()  # that of this `fit` may have ended by an error
        return session is not None and self in session.callbacks

    def _restart(self) -> None:
        self._saver.wait()  # a `fit` that ended by an error may have begun a checkpoint
        self._position = Position()
        self._saved = 0  # steps before the last checkpoint
        self._schedule.restart()
        self._reader: Reader | None = None  # until it is restored
        self._restored: Restore | None = None  # until the first step begins
        self._is_cut = False  # the epoch ended before its last step
        self._is_due = self._is_stopping = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the newest checkpoint, to be restored when the epoch begins. Collective."""
        super().on_train_begin(logs)
        self._require_no_other()
        self._restart()
        self._saver.wait_for_earlier()
        begin_at_epoch(self.model, None)
        self._run = self._saver.name_run()
        self._first_epoch = self.session.call.initial_epoch
        self._saver.make_directory(self._run)
        parts = self._saver.newest_sound()
        if parts is not None:
            self._reader = Reader(parts)
            self._position = Position(**self._reader.info["position"])
            self._saved = self._position.n_steps
            begin_at_epoch(self.model, self._position.epoch)
            leader = group_of(self._reader.source, self._reader.groups)[0]
            resumable.restore_callbacks(self.session.callbacks, parts, leader)
            is_over = self._position.epoch >= int((self.params or {}).get("epochs") or 0)
            if is_over and is_built(self.model):
                # Keras sets final values of averages before the restore.
                build_model(self.model)
                Restore(self.model, self._reader)  # builds the optimizers on what they trained
        self._schedule.start_clock()
        self._handler.install()

    def _require_no_other(self) -> None:
        others = [c for c in self.session.callbacks if isinstance(c, Checkpoint) and c is not self]
        if others:  # on all ranks, which have compared their callbacks
            raise ConfigError(
                f"{type(self).__name__} must be the only callback that restores and saves the run. "
                f"Received: {type(others[0]).__name__} with it. Remove one."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restore the checkpoint that was found, before the other callbacks begin the epoch."""
        super().on_epoch_begin(epoch, logs)
        first_step = self._begin_from(self._reader, epoch) if self._reader is not None else 0
        self._position = replace(self._position, epoch=epoch, step=first_step)

    def _begin_from(self, reader: Reader, epoch: int) -> int:
        """Restore a checkpoint; return the first step of the epoch."""
        self._reader = None
        begin_at_epoch(self.model, None)  # Keras has read it
        position = self._position
        self._restore_counters(reader)
        first_step = position.step if epoch == position.epoch else 0
        self.session.note_resumed(position.n_steps - first_step)
        restore_data(self.session.data, position.data, first_step)
        restored = self._restore(reader)
        first_step = continue_epoch(self.session.call.epochs, epoch - self._first_epoch, first_step)
        self.session.begin_within(epoch, first_step)
        if first_step > 0:
            restored.restore_metrics()
        if runtime.rank() == 0:
            logger.info("Resuming from step %d, epoch %d.", position.n_steps, epoch + 1)
        return first_step

    def _restore_counters(self, reader: Reader) -> None:
        source, parts = reader.source, reader.parts
        best = resumable.read_best_weights(parts, source, group_of(source, reader.groups)[0])
        resumable.restore_counters(
            self.session.callbacks,
            parts[source].info["keras_callbacks"],
            is_own=source == runtime.rank(),
            best_weights=best,
        )

    def _restore(self, reader: Reader) -> Restore:
        build_model(self.model)
        self._restored = Restore(self.model, reader)
        self._restored.run()
        return self._restored

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Take a checkpoint if one is due, now that all callbacks have ended the last step."""
        super().on_train_batch_begin(batch, logs)
        if self._restored is not None:
            self._restored.finish()
            self._restored = None
        if self._is_stopping:
            self._save_last(self._position.n_steps > self._saved, is_end=False)
        self._agree_on_due("step")
        if self._is_due:
            self._save(self._run)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count steps, and agree on checkpoints that are due. Collective about once a second."""
        super().on_train_batch_end(batch, logs)
        if self.session.is_given_up:
            return
        before = self._position.n_steps
        step = steps_until(self.model, batch, self.params)
        n_steps = before + step - self._position.step
        self._position = replace(self._position, n_steps=n_steps, step=step)
        is_due = self._schedule.is_due_after_steps(before, self._position.n_steps)
        of_all_ranks = self._schedule.end_step(preemption.is_requested(), self._saver.has_failed)
        self._is_stopping |= of_all_ranks.stops
        if is_due or of_all_ranks.is_time:
            self._make_due()
        elif of_all_ranks.has_failed:
            self._saver.finish()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Let a checkpoint be taken once all callbacks have ended the epoch."""
        self._agree_on_due("epoch")  # before the other ranks learn that this rank's epoch is over
        super().on_epoch_end(epoch, logs)
        if self.is_void:
            return
        steps = (self.params or {}).get("steps")
        # With an unknown number of steps, stopping training within a batch cuts the epoch.
        is_stopped = bool(self.model.stop_training)
        self._is_cut = is_stopped if steps is None else self._position.step < int(steps)
        self._position = replace(self._position, epoch=epoch + 1, step=0)
        if self._schedule.is_due_after_epoch(epoch):
            self._make_due()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Save the end of training, unless an epoch was cut or the model is broken. Collective."""
        if not self.session.asks_before_epochs:
            self._agree_on_due("end")
        super().on_train_end(logs)
        if self._reader is not None:  # no epoch has begun
            if not is_built(self.model):
                raise ConfigError(
                    "model must be built, as no training is left. Received: "
                    f"model={self.model.name!r} and a checkpoint of the end of training. "
                    f"{how_to_build(self.model)}"
                )
            self._restore(self._reader)
            restore_data(self.session.data, self._position.data, None)
        begin_at_epoch(self.model, None)
        self._save_last(self._position.n_steps > self._saved and not self._is_cut, is_end=True)

    def _make_due(self) -> None:
        self._saver.finish()
        self._is_due = True

    def _agree_on_due(self, moment: str) -> None:
        """Drop a due checkpoint if parts must be sent and ranks are in different hooks."""
        if self._is_due and not self.shared and not self._is_stopping:
            is_over = self.session.is_over  # which all ranks know then
            hooks = [] if is_over else objects.allgather_object(moment, name="hook of fit")
            self._is_due = len(set(hooks)) == 1

    def _save(self, run: str, is_end: bool = False) -> None:
        """Copy this rank's part and begin to write it. Collective if the folder is not shared."""
        self._is_due = False
        data = self.session.data
        state = data.state() if isinstance(data, GlobalBatches | DatasetBatches) else None
        self._position = replace(self._position, data=state)
        part = take_snapshot(self.model, self.session.callbacks, self._position, run, is_end)
        self._saver.start(part, run)
        self._saved = self._position.n_steps
        self._schedule.start_clock()

    def _save_last(self, is_new: bool, is_end: bool) -> None:
        """Save if any rank has new steps; ranks may call this from different hooks. Collective."""
        self._saver.finish()
        is_new, stops = agree_on_end(is_new, preemption.is_requested(), is_broken(self.model))
        self._is_stopping |= stops
        if is_new:  # under a new name: a rank may have begun a checkpoint of this step
            self._save(self._saver.name_run(), is_end)
            self._saver.finish()
            self._is_stopping |= agree_on_end(False, preemption.is_requested())[1]
        self._handler.remove()
        if self._is_stopping:
            preemption.forget_request()
            if runtime.rank() == 0:
                logger.warning("%s", self._describe_stop())
            raise SystemExit(PREEMPTED)

    def _describe_stop(self) -> str:
        """The line about a stop on request."""
        if self._saved == 0:
            return "tfscale: stopped, as requested; no checkpoint was written."
        return (
            f"tfscale: saved step {self._saved} in {self.directory}, and stopped, as requested: "
            "start the job again to resume."
        )


class BackupAndRestore(Checkpoint):
    """`keras.callbacks.BackupAndRestore` on any number of ranks.

    A `tfscale.callbacks.Checkpoint` with Keras's arguments: rank 0 writes and reads the parts of
    all ranks, so only rank 0 needs the folder, and a run may resume with another number of ranks.
    A backup is written when the next step begins, after all callbacks of the epoch before.
    A resumed run continues with the next step, bit for bit if operations are deterministic.

    Collective: all ranks must pass it to `fit`. Keras's own callback would write and delete the
    same files on every rank.

    Args:
        backup_dir: Folder that is used for nothing else.
        save_freq: "epoch", or the number of batches between two backups.
        double_checkpoint: Also keep the previous backup, in case the newest one gets damaged.
        delete_checkpoint: Delete the backups, and the folder if it is otherwise empty, when
            training has ended.

    Raises:
        ConfigError: An argument does not fit; see also `Checkpoint`.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> backup = tfscale.callbacks.BackupAndRestore("backup", delete_checkpoint=False)
        >>> data = tfscale.data.GlobalBatches(np.zeros((4, 3)), np.ones((4, 1)), batch_size=2)
        >>> history = model.fit(data, epochs=3, callbacks=[backup], verbose=0)
        >>> history = model.fit(data, epochs=5, callbacks=[backup], verbose=0)  # resumes
        >>> history.epoch
        [3, 4]
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        require(bool(backup_dir), "backup_dir", "the name of a folder", backup_dir)
        is_epoch = save_freq == "epoch"
        super().__init__(
            backup_dir,
            None if is_epoch else check_integer("save_freq", save_freq, 1),
            every_n_epochs=1 if is_epoch else None,
            keep=2 if double_checkpoint else 1,
            asynchronous=False,
            shared=False,
        )
        self.backup_dir, self.save_freq = backup_dir, save_freq
        self.delete_checkpoint = delete_checkpoint

    def _save_last(self, is_new: bool, is_end: bool) -> None:
        is_deleted = is_end and self.delete_checkpoint
        super()._save_last(is_new and not is_deleted, is_end)
        if is_deleted and runtime.rank() == 0:
            delete_all(self.directory)
