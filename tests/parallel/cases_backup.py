"""A run that is interrupted and started again ends as one that was not."""

import contextlib
import functools
import tempfile

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import (
    InterruptAt,
    Interruption,
    StopAt,
    float64,
    require_error,
    shared_folder,
)
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    RankZero,
)
from tfscale.checkpoints import list_checkpoints
from tfscale.testing import require_identical

BATCH = 12


def network():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.Dropout(0.4), layers.Dense(1)]
    )


def train(callbacks, seed, exchange="allreduce", earlier_epochs=0, order=4, **options):
    """Train for four epochs, in a first `fit` for some others."""
    keras.utils.set_random_seed(seed)
    model, adam = network(), keras.optimizers.Adam(0.01)
    optimizer = tfscale.DistributedOptimizer(adam, exchange=exchange, **options)
    model.compile(optimizer=optimizer, loss="mse")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(5 * BATCH, 4)), random.normal(size=(5 * BATCH, 1))
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, seed=order)
    start = BroadcastGlobalVariablesCallback(0)
    if earlier_epochs:
        model.fit(data, epochs=earlier_epochs, verbose=0, callbacks=[start])
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=4, verbose=0, callbacks=[*callbacks, start])
    return [*(v.numpy() for v in model.variables), *optimizer.full_state()]


def interrupt_and_go_on(exchange=lambda: "allreduce", more=list, earlier=0, **options):
    """Compare bit by bit, dropout included; other seeds and orders, so all comes from rank 0.

    A program that is started again leaves out its first `fit`, which is over.
    """

    def run(seed, *callbacks, **place):
        callbacks = [*callbacks, *more()]
        return train(callbacks, seed + tfscale.rank(), exchange(), **place, **options)

    folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
    own_folder = folder if tfscale.rank() == 0 else f"{folder}-not-there-{tfscale.rank()}"
    with float64():
        expected = run(1, earlier_epochs=earlier)
        run(1, BackupAndRestore(own_folder), InterruptAt(2), earlier_epochs=earlier)
        restored = run(50, BackupAndRestore(own_folder), order=9)
    require_identical(restored, expected)


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
    """Keras's own backup, and a state that comes too late on one rank: others would wait for it."""
    early = [Count()] if tfscale.rank() == 1 else []
    with shared_folder() as folder:
        theirs = keras.callbacks.BackupAndRestore(folder / "keras")
        for callbacks, *texts in (
            ([theirs], "tfscale.callbacks.BackupAndRestore"),
            ([*early, BackupAndRestore(folder)], "Received: Count", "BackupAndRestore"),
            ([*early, Checkpoint(folder)], "Received: Count", "Checkpoint"),
        ):
            require_error(lambda c=callbacks: train(c, 1), "ConfigError", *texts)
