"""A run that is interrupted and started again ends as one that was not."""

import functools
import tempfile

import keras

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import InterruptAt, StopAt, require_error, shared_folder
from tests.parallel.backup_runs import interrupt_and_go_on, train
from tfscale.callbacks import BackupAndRestore, Checkpoint, RankZero
from tfscale.checkpoints import list_checkpoints


@sizes(1, 2, 3, timeout_s=200)
def case_a_run_goes_on_after_an_interruption():
    interrupt_and_go_on()
    interrupt_and_go_on(tfscale.Sharded)
    interrupt_and_go_on(earlier=2)


@sizes(2, 3, timeout_s=120)
def case_one_rank_stops_where_a_backup_is_due():
    """The others are about to begin a step: parts are sent by all ranks, or by none."""
    for step, save_freq in ((None, "epoch"), (2, 4)):
        folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
        backup = BackupAndRestore(folder, save_freq, delete_checkpoint=False)
        train([backup, StopAt(step)], 1)
        found = list_checkpoints(folder)[0]
        # Training did not end in mid-epoch, or the last backup before that counts.
        assert (found.is_finished, found.step) == (True, 10 if step is None else 4)
        again = StopAt(99)
        train([BackupAndRestore(folder), again], 1)
        assert again.epochs == ([2, 3] if step is None else [0, 1, 2, 3])


class Count(keras.callbacks.Callback):
    """Has a state of its own, which must come before training begins."""

    def on_train_begin(self, logs=None):
        self.n = getattr(self, "restored", 0)

    def on_epoch_end(self, epoch, logs=None):
        self.n += 1

    def backup_state(self):
        return {"n": self.n}

    def restore_state(self, state, epoch):
        self.restored = state["n"]


@sizes(2, 3, timeout_s=120)
def case_a_state_inside_of_rank_zero():
    """The callbacks of the other ranks know nothing, and are not asked."""
    written = functools.partial(Checkpoint, asynchronous=False)
    with shared_folder() as folder:
        for name, restore in (("backup", BackupAndRestore), ("checkpoint", written)):
            train([restore(folder / name), RankZero(Count()), InterruptAt(2)], 1)
            count = Count()
            train([restore(folder / name), RankZero(count)], 1)
            restored = tfscale.allgather_object((vars(count).get("restored"), vars(count).get("n")))
            assert restored == [(2, 4), *[(None, None)] * (tfscale.size() - 1)], (name, restored)


@sizes(2, timeout_s=60)
def case_what_is_refused():
    """Keras's own backup, and two callbacks that restore."""
    with shared_folder() as folder:
        theirs = keras.callbacks.BackupAndRestore(folder / "keras")
        two = [BackupAndRestore(folder / "one"), Checkpoint(folder / "other")]
        for callbacks, text in (
            ([theirs], "tfscale.callbacks.BackupAndRestore"),
            (two, "Received: Checkpoint with it"),
        ):
            require_error(lambda c=callbacks: train(c, 1), "ConfigError", text)
