"""A backup taken within an interval of local SGD: groups, phase and state continue."""

import tempfile

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import InterruptAt, float64, shared_folder
from tests.parallel.backup_runs import interrupt_and_go_on, train
from tests.parallel.checkpoint_runs import Run, forget_after, growing
from tfscale.callbacks import BackupAndRestore, ModelDistance
from tfscale.files import read_json_lines
from tfscale.testing import require_identical


@sizes(2, timeout_s=120)
def case_what_groups_compress_survives():
    compression = tfscale.Compression.bf16
    interrupt_and_go_on(lambda: tfscale.LocalSGD(2, 7, "allreduce"), compression=compression)


class Follow(keras.callbacks.Callback):
    """Keeps this rank's weights and phase after each step, and before the first one."""

    def __init__(self):
        super().__init__()
        self.begin, self.ends = None, []

    def _now(self):
        average = self.model.optimizer.bound.average
        return int(average.since.numpy()), [v.numpy() for v in self.model.trainable_variables]

    def on_train_batch_begin(self, batch, logs=None):
        self.begin = self.begin or self._now()

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(self._now())


def interrupted():
    folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
    followed = Follow()
    callbacks = [BackupAndRestore(folder), followed, InterruptAt(1)]
    train(callbacks, 1, tfscale.LocalSGD(2, 7, "allreduce"))
    return folder, followed.ends


def begun(folder, **options):
    followed = Follow()
    strategy = tfscale.LocalSGD(2, 7, **{"within": "allreduce", **options})
    train([BackupAndRestore(folder), followed], 50, strategy)
    return followed.begin


@sizes(4, timeout_s=200)
def case_another_exchange_inside_goes_on_in_mid_interval():
    """Only the first rank of a group has written the phase; all of them read it."""
    with float64():
        folder, ends = interrupted()
        since, weights = begun(folder, within=tfscale.Sharded())
        assert since == ends[4][0] == 5
        require_identical(weights, ends[4][1])


@sizes(2, timeout_s=120)
def case_what_no_backup_knows_begins_with_the_average():
    """An outer optimizer: nothing was written of the model that it moves."""
    with float64():
        folder, ends = interrupted()
        every = tfscale.allgather_object(ends[4][1])
        since, weights = begun(folder, outer=keras.optimizers.SGD(0.7))
        assert since == 0 and not np.array_equal(every[0][0], every[1][0])
        for i, own in enumerate(weights):
            np.testing.assert_allclose(own, (every[0][i] + every[1][i]) / 2, rtol=0, atol=1e-12)


@sizes(2, timeout_s=120)
def case_distances_go_on_and_an_interval_is_what_the_program_says():
    def run(*more, interval=2, place=None):
        record = ModelDistance(place)
        train([*more, record], 4, tfscale.LocalSGD(2, interval, "allreduce"))
        return record.distances

    with float64(), shared_folder() as folder:
        places = first, other = folder / "first", folder / "other"
        run(BackupAndRestore(folder / "backup"), InterruptAt(1), place=first)
        rest = run(BackupAndRestore(folder / "backup"), place=first)  # the second epoch again
        assert rest == run(place=other)[2:] and len(rest) == 8
        tfscale.barrier()
        lines = [read_json_lines(path / "distance.jsonl") for path in places]
        for line in (*lines[0], *lines[1]):
            line["layers"] = list(line["layers"].values())  # this process has counted the names
        assert lines[0] == lines[1] and len(lines[0]) == 10, lines
        tfscale.barrier()
        run(BackupAndRestore(folder / "second"), InterruptAt(1), interval=8)
        rest = run(BackupAndRestore(folder / "second"), interval=5)
        # Five steps were made of an interval that had eight.
        assert [step for step, _ in rest] == [6, 11, 16], rest


@sizes(2, timeout_s=120)
def case_distances_while_batches_grow():
    """5 steps, 2 steps, 1 step: a run that resumes in the second epoch counts the longer first."""
    run = Run(exchange=tfscale.LocalSGD(2, 2, "allreduce"), callbacks=growing)
    with float64(), shared_folder() as folder:
        first, second = ModelDistance(folder / "record"), ModelDistance(folder / "record")
        run.train(folder / "saved", first, every_n_steps=1, keep=99)
        forget_after(folder / "saved", 6)
        run.train(folder / "saved", second, keep=99)
        tfscale.barrier()
        lines = read_json_lines(folder / "record" / "distance.jsonl")
    assert [step for step, _ in first.distances] == [2, 4, 6, 8]
    assert second.distances == first.distances[3:]
    assert [(line["step"], line["distance"]) for line in lines] == first.distances
