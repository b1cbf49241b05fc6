"""Keep a backup of a run while it trains, with the arguments of Keras."""

from __future__ import annotations

import os

from tfscale.callbacks.checkpoint import Checkpoint
from tfscale.checkpoints.files import delete_all
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.slices import check_integer


class BackupAndRestore(Checkpoint):
    """`keras.callbacks.BackupAndRestore` on any number of ranks.

    A `tfscale.callbacks.Checkpoint` with Keras's arguments: rank 0 writes and reads the parts of
    all ranks, so only rank 0 needs the folder, and a run may go on with another number of ranks.
    A backup is written when the first step after it begins: all callbacks have then ended the epoch
    before. A run goes on with the next step, and bit by bit where operations are deterministic.

    Collective: all ranks must pass it to `fit`, before other callbacks of tfscale and those with a
    state of their own. Keras's own would write and delete the same files on every rank.

    Args:
        backup_dir: Folder that is used for nothing else.
        save_freq: "epoch", or the number of batches between two backups.
        double_checkpoint: Keep the backup before, too, in case the newest one gets damaged.
        delete_checkpoint: Delete the backups, and the folder if nothing else is in it, when
            training has ended.

    Raises:
        ConfigError: An argument does not fit; see `Checkpoint`, too.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        if not backup_dir:
            raise ConfigError(f"backup_dir must name a folder. Received: {backup_dir!r}.")
        is_epoch = save_freq == "epoch"
        super().__init__(
            backup_dir,
            None if is_epoch else check_integer("save_freq", save_freq, 1),
            every_n_epochs=1 if is_epoch else None,
            keep=2 if double_checkpoint else 1,
            asynchronous=False,
            shared=False,
        )
        self.backup_dir = backup_dir
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint

    def _save_last(self, is_new: bool, is_end: bool) -> None:
        is_deleted = is_end and self.delete_checkpoint
        super()._save_last(is_new and not is_deleted, is_end)
        if is_deleted and runtime.rank() == 0:
            delete_all(self.directory)
