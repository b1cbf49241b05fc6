"""A backup taken within an interval of local SGD: groups, phase and state continue."""

import tempfile

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import require_identical, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_backup import InterruptAfter, interrupt_and_go_on, train
from tests.parallel.cases_equality import float64
from tfscale.callbacks import BackupAndRestore, ModelDistance
from tfscale.comm import runtime
from tfscale.files import read_json_lines


@sizes(2, timeout_s=120)
def case_phases_survive():
    """Five steps in an epoch, seven in an interval, interrupted in the third epoch."""
    interrupt_and_go_on(lambda: tfscale.LocalSGD(2, 7, "allreduce"))


@sizes(4, timeout_s=200)
def case_phases_of_sharded_groups_survive():
    """Groups begin in the second epoch; an outer optimizer has a state of its own."""

    def exchange():
        outer = keras.optimizers.SGD(0.7, momentum=0.9)
        return tfscale.LocalSGD(2, 3, start=1, outer=outer)

    interrupt_and_go_on(exchange)


@sizes(2, timeout_s=120)
def case_what_groups_compress_survives():
    compression = tfscale.Compression.bf16
    interrupt_and_go_on(lambda: tfscale.LocalSGD(2, 7, "allreduce"), compression=compression)


@sizes(1, 2, timeout_s=120)
def case_rates_that_follow_the_present_one_survive():
    """The schedule has set the rate of an epoch before the backup is written."""

    def schedule():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)]

    for exchange in ("allreduce", tfscale.LocalSGD(tfscale.size(), 7, "allreduce")):
        interrupt_and_go_on(lambda e=exchange: e, schedule)


class Follow(keras.callbacks.Callback):
    """Keeps this rank's weights and phase after each step, and before the first one."""

    def __init__(self):
        super().__init__()
        self.begin, self.ends = None, []

    def _now(self):
        average = self.model.optimizer.group_average
        return int(average.since.numpy()), [v.numpy() for v in self.model.trainable_variables]

    def on_train_batch_begin(self, batch, logs=None):
        self.begin = self.begin or self._now()

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(self._now())


def interrupted(save_freq):
    """Return the folder of a backup of two groups, and what they were after each step."""
    folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
    followed = Follow()
    backup = BackupAndRestore(folder, save_freq=save_freq)
    train([backup, followed, InterruptAfter(1)], 1, tfscale.LocalSGD(2, 7, "allreduce"))
    return folder, followed.ends


def begun(folder, groups, save_freq, **options):
    """Return phase and weights with which a run continues."""
    followed = Follow()
    backup = BackupAndRestore(folder, save_freq=save_freq)
    train([backup, followed], 50, tfscale.LocalSGD(groups, 7, **{"within": "allreduce", **options}))
    return followed.begin


@sizes(2, timeout_s=120)
def case_a_backup_between_steps():
    with float64():
        folder, ends = interrupted(4)  # steps 4 and 8 of 10
        every = tfscale.allgather_object(ends[7][1])
        assert not np.array_equal(every[0][0], every[1][0])
        since, weights = begun(folder, 2, 4)
        assert since == ends[7][0] == 1
        require_identical(weights, ends[7][1])


@sizes(4, timeout_s=120)
def case_other_groups_begin_with_the_average():
    with float64():
        folder, ends = interrupted("epoch")
        every = tfscale.allgather_object(ends[4][1])
        since, weights = begun(folder, 4, "epoch")
        assert since == 0 and runtime.size() == len(every)
        assert not np.array_equal(every[0][0], every[2][0])
        for i, own in enumerate(weights):
            np.testing.assert_allclose(own, (every[0][i] + every[2][i]) / 2, rtol=0, atol=1e-12)


@sizes(4, timeout_s=200)
def case_another_exchange_inside_goes_on_in_mid_interval():
    """Only the first rank of a group has written the phase; all of them read it."""
    with float64():
        folder, ends = interrupted("epoch")
        since, weights = begun(folder, 2, "epoch", within=tfscale.Sharded())
        assert since == ends[4][0] == 5
        require_identical(weights, ends[4][1])


@sizes(2, timeout_s=120)
def case_what_no_backup_knows_begins_with_the_average():
    """An outer optimizer: nothing was written of the model that it moves."""
    with float64():
        folder, ends = interrupted("epoch")
        every = tfscale.allgather_object(ends[4][1])
        since, weights = begun(folder, 2, "epoch", outer=keras.optimizers.SGD(0.7))
        assert since == 0 and not np.array_equal(every[0][0], every[1][0])
        for i, own in enumerate(weights):
            np.testing.assert_allclose(own, (every[0][i] + every[1][i]) / 2, rtol=0, atol=1e-12)


@sizes(2, timeout_s=120)
def case_distances_go_on_and_an_interval_is_what_the_program_says():
    def run(*more, interval=2):
        record = ModelDistance(places.pop())
        train([*more, record], 4, tfscale.LocalSGD(2, interval, "allreduce"))
        return record

    with float64(), shared_folder() as folder:
        other, first = folder / "other", folder / "first"
        places = [other, first, first]
        run(BackupAndRestore(folder / "backup"), InterruptAfter(1))
        record = run(BackupAndRestore(folder / "backup"))  # the second epoch is made again
        assert record.distances == run().distances[2:] and len(record.distances) == 8
        tfscale.barrier()
        lines = [read_json_lines(path / "distance.jsonl") for path in (first, other)]
        for line in (*lines[0], *lines[1]):
            line["layers"] = list(line["layers"].values())  # this process has counted the names
        assert lines[0] == lines[1] and len(lines[0]) == 10, lines
        tfscale.barrier()
        places = [None, None]
        run(BackupAndRestore(folder / "second"), InterruptAfter(1), interval=8)
        record = run(BackupAndRestore(folder / "second"), interval=5)
        steps = [step for step, _ in record.distances]
        # Five steps were made of an interval that had eight.
        assert steps == [6, 11, 16], steps
