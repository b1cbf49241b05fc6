"""Runs that continue from a checkpoint or a backup at the same number of ranks: bit by bit."""

import errno
import os
import shutil

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import BATCH
from tests.helpers.ranks import InterruptAt, float64, require_error, shared_folder, values_of
from tests.parallel.backup_runs import train
from tests.parallel.checkpoint_runs import Act, Run, forget_after, growing
from tests.parallel.nonfinite_data import BAD, data
from tfscale import preemption
from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks.synchronize import NonTrainableState
from tfscale.checkpoints import files as module
from tfscale.checkpoints import list_checkpoints
from tfscale.testing import require_equal_ranks, require_identical

N_STEPS = 15


def check(run, *steps):
    """A run that continues from each of the steps ends as the one that wrote them did."""
    with float64(), shared_folder() as folder:
        whole, noted = run.train(folder, every_n_steps=1, keep=99)
        for step in sorted(steps, reverse=True):
            forget_after(folder, step)
            rest, later = run.train(folder, keep=99)
            require_identical(rest, whole)
            assert later.batches == noted.batches[step:]
            assert later.logs == noted.logs[-len(later.logs) :]


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def with_outer():
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return tfscale.LocalSGD(2, 4, "allreduce", outer=outer, start=1)


@sizes(1, 2, 3, timeout_s=200)
def case_dropout_and_moving_statistics():
    """State that differs between ranks; in mid-epoch, and between two."""
    check(Run(dropout=0.3), 7, 5)


@sizes(2, timeout_s=300)
def case_exchanges():
    """Sums that are not applied yet, groups with models of their own, lengths of intervals.

    And the average from which a guard measures.
    """
    sharded = tfscale.Sharded(bucket_mb=1e-4)
    growing_interval = tfscale.GrowingInterval(initial=2, growth=0.5, maximum=6)
    guard = tfscale.DistanceGuard(limit=0.05, maximum=7)
    for run, step in (
        (Run(exchange=tfscale.Chunked(first_chunk_layers=1)), 7),
        (Run(exchange=sharded, options={"backward_passes_per_step": 2}), 7),
        (Run(exchange=tfscale.Sharded(), callbacks=growing), 6),
        (Run(momentum, tfscale.LocalSGD(2, 4, "allreduce", average="gradients")), 7),
        (Run(momentum, with_outer), 8),
        (Run(exchange=tfscale.LocalSGD(2, growing_interval, "allreduce")), 7),
        (Run(exchange=tfscale.LocalSGD(2, guard, "allreduce")), 7),
    ):
        check(run, step)


@sizes(4, timeout_s=200)
def case_local_sgd_with_shards():
    """Also where fragments are under way: from step 4 to step 7."""
    check(Run(exchange=tfscale.LocalSGD(2, 4, average="gradients")), 7)
    for within, *steps in ((tfscale.Sharded(), 7, 5), ("allreduce", 5)):
        check(Run(exchange=tfscale.LocalSGD(2, 4, within, fragments=2, overlap=3)), *steps)


@sizes(2, timeout_s=120)
def case_one_rank_is_asked_to_make_room():
    """All ranks save the same step and leave with the same code; the run then continues."""
    ask = preemption.request_save_and_stop
    with float64(), shared_folder() as folder:
        run = Run(exchange=tfscale.Sharded())
        whole, _ = run.train()
        try:
            run.train(folder, Act(3, lambda model: ask(), rank=1))
            raise AssertionError("it did not end")
        except SystemExit as end:
            assert tfscale.allgather_object(end.code) == [75, 75]
        tfscale.barrier()
        # Ranks ask each other about once a second, so an epoch may end before.
        found = list_checkpoints(folder)[0]
        assert found.is_finished and 3 < found.step <= N_STEPS, found
        rest, _ = run.train(folder)
        require_identical(rest, whole)


@sizes(2, timeout_s=120)
def case_one_rank_cannot_write():
    """Its disk is full: all ranks say so, and the checkpoint before is whole."""
    write = module.write_part

    def fill(folder, rank, part):
        if rank == 1 and part.info["step"] == 8:
            raise OSError(28, "No space left on device")
        write(folder, rank, part)

    module.write_part = fill
    try:
        with float64(), shared_folder() as folder:
            require_error(
                lambda: Run().train(folder, every_n_steps=4),
                "Could not write parts of a checkpoint",
                "rank 1: OSError: [Errno 28] No space left on device",
            )
            assert [f.step for f in list_checkpoints(folder) if f.is_finished] == [4]
    finally:
        module.write_part = write


@sizes(2, timeout_s=120)
def case_one_rank_finds_damage():
    """All ranks take the checkpoint before; where all are damaged all ranks say so.

    The newest has other bits, the next manifests of other ranks, the third files of another rank.
    """
    with float64(), shared_folder() as folder:
        run = Run(exchange=tfscale.Sharded())
        whole, noted = run.write(folder, 9)
        newest, second, third = (found.path for found in list_checkpoints(folder)[:3])
        if tfscale.rank() == 0:
            damage(newest)
            swap(second, "rank-00000.manifest", "rank-00001.manifest")
            for kind in (".manifest", ".safetensors"):
                shutil.copy(third / f"rank-00000{kind}", third / f"rank-00001{kind}")
        tfscale.barrier()
        rest, later = run.train(folder, keep=99)
        assert later.batches == noted.batches[6:]
        require_identical(rest, whole)
        assert all((folder / f"damaged-{p.name}").exists() for p in (newest, second, third))
        if tfscale.rank() == 0:
            for found in list_checkpoints(folder):
                damage(found.path)
        tfscale.barrier()
        require_error(lambda: run.train(folder), "damaged ones only", "rank-00001.safetensors")


def damage(folder):
    path = folder / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def swap(folder, one, other):
    aside = folder / "aside"
    (folder / one).rename(aside)
    (folder / other).rename(folder / one)
    aside.rename(folder / other)


class Break(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and tfscale.rank() == 1:
            weight = self.model.trainable_variables[0]
            weight.assign(np.full(weight.shape, np.nan))


@sizes(2, timeout_s=60)
def case_what_rank_0_cannot_list_and_what_one_rank_has_broken():
    """The directory, or the newest checkpoint in it: no rank begins. NaN is not saved."""
    look = os.listdir

    def refuse(path="."):
        if tfscale.rank() == 0 and str(path) == str(hidden):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(path)

    with shared_folder() as folder:
        Run().train(folder, Break(), every_n_steps=7)
        assert [f.step for f in list_checkpoints(folder)] == [14, 7]
        newest = list_checkpoints(folder)[0].path
        tfscale.barrier()
        os.listdir = refuse
        try:
            for hidden in (folder, newest):
                text = f"rank 0: {hidden.name}: Input/output error"
                require_error(lambda: Run().train(folder), "ConfigError", text)
        finally:
            os.listdir = look
        own = folder / f"rank-{tfscale.rank()}"
        require_error(
            lambda: Run().train(own), "directory must be one that all ranks write to", "rank 1"
        )


@sizes(2, timeout_s=120)
def case_a_callback_that_one_rank_has():
    """Horovod's idiom: rank 0 alone saves models, and all ranks lower the learning rate."""

    with shared_folder() as folder:

        def callbacks(data):
            own = [keras.callbacks.ModelCheckpoint(folder / "m.keras")] * (tfscale.rank() == 0)
            lower = keras.callbacks.ReduceLROnPlateau("loss", patience=2, mode="max", min_lr=1e-9)
            return [*own, lower]

        # Two epochs without progress end with the third, in which both runs continue.
        check(Run(callbacks=callbacks), 12, 10)


@sizes(2, timeout_s=120)
def case_best_weights_of_before_the_interruption():
    """The loss falls, so those of the first epoch are the best, and are put back at the end."""

    def callbacks(data):
        options = {"mode": "max", "patience": 9, "restore_best_weights": True}
        return [keras.callbacks.EarlyStopping("loss", **options)]

    check(Run(callbacks=callbacks, dropout=0.3), 12, 7)
    check(Run(callbacks=callbacks, exchange=tfscale.Sharded()), 7)


def normalized(optimizer, **options):
    """Train with moving statistics; return the layer, what they were after each step, and logs."""
    keras.utils.set_random_seed(3)
    norm, seen = keras.layers.BatchNormalization(momentum=0.5), []
    # No step changes the kernel before it: statistics of a step depend on its samples alone.
    first = keras.layers.Dense(4, trainable=False)
    model = keras.Sequential([keras.Input((6,)), first, norm, keras.layers.Dense(3)])
    model.compile(optimizer, "mse", **options)
    x, clean, y = data()
    batches = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(values_of(norm.non_trainable_variables))
    )
    callbacks = [note, NonTrainableState()]  # means of ranks come at the end
    valid = (clean[:BATCH], y[:BATCH])
    logs = model.fit(batches, verbose=0, callbacks=callbacks, validation_data=valid).history
    return norm, seen, logs


@sizes(1, 2, 3, timeout_s=200)
def case_a_skipped_step_leaves_statistics_finite():
    """On the bad rank they are those of the step before; what follows is averaged and finite."""
    is_bad = tfscale.rank() == tfscale.size() - 1
    scaled = keras.optimizers.LossScaleOptimizer
    for wrap, passes, options in (
        (lambda inner: inner, 1, {}),
        (lambda inner: inner, 1, {"run_eagerly": True}),
        (lambda inner: inner, 2, {}),
        (lambda inner: scaled(inner, initial_scale=2.0), 1, {}),
    ):
        with float64():
            optimizer = tfscale.DistributedOptimizer(
                wrap(keras.optimizers.SGD(0.01)), nonfinite="skip", backward_passes_per_step=passes
            )
            norm, seen, logs = normalized(optimizer, **options)
        assert len(seen) == len(data()[0]) // BATCH and np.all(np.isfinite(seen)), (passes, options)
        stayed = [np.array_equal(*pair) for pair in zip(seen[BAD], seen[BAD - 1], strict=True)]
        assert stayed == [is_bad, is_bad], (passes, options)
        assert not np.array_equal(seen[BAD + 1][0], seen[BAD][0])
        require_equal_ranks(norm.non_trainable_variables)
        assert np.isfinite(logs["val_loss"][0])
        assert np.isnan(logs["loss"][0]) == is_bad  # as docs/exchanges.md says


@sizes(2, timeout_s=120)
def case_a_backup_that_rank_0_cannot_read():
    """The other ranks do not wait for it; nor where they cannot even be told of a folder."""
    with shared_folder() as folder:
        own = folder / f"of-rank-{tfscale.rank()}"
        train([BackupAndRestore(own), InterruptAt(2)], 1 + tfscale.rank())
        if tfscale.rank() == 0:
            for path in own.glob("step-*/rank-00001.safetensors"):
                path.write_bytes(b"")
            (folder / "file").touch()
        for where, text in (
            (own, "damaged ones only"),
            (folder / "file", "directory must be one that rank 0 can write to"),
        ):
            action = lambda where=where: train([BackupAndRestore(where)], 1)  # noqa: E731
            require_error(action, "ConfigError", text)
