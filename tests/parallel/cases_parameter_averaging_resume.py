"""Ranks that train each on its own and average parameters: resuming, and stopping together."""

from __future__ import annotations

import contextlib
import tempfile

import keras
import numpy as np

import tfscale
from tests.helpers.spawn import sizes
from tests.parallel.cases_backup import BATCH, InterruptAfter, Interruption, network
from tests.parallel.cases_equality import float64
from tests.parallel.cases_local_stop import forget_the_stop
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    ParameterAveraging,
)
from tfscale.comm import runtime

EPOCHS, STEPS = 5, 5


def train(averaging, before=(), after=(), seed=1):
    """Return the model after a `fit` of its own batches, whole or interrupted."""
    keras.utils.set_random_seed(seed + runtime.rank())
    model = network()
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(STEPS * BATCH, 4)), random.normal(size=(STEPS * BATCH, 1))
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, seed=4)
    start = BroadcastGlobalVariablesCallback(0, consistency_check=False, non_trainable="local")
    callbacks = [*before, start, averaging, *after]
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return model


def state_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def every_second():
    return ParameterAveraging(2, weights=tfscale.DistanceWeights(1.0))


def interrupt_and_go_on(epoch):
    """Interrupt in an epoch, whose beginning is the last that was written; compare bit by bit.

    Seeds of the second run are others: all must come from the backup.
    """
    folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
    own_folder = folder if runtime.rank() == 0 else f"{folder}-not-there-{runtime.rank()}"
    with float64():
        whole = every_second()
        expected = state_of(train(whole))
        train(every_second(), [BackupAndRestore(own_folder)], [InterruptAfter(epoch)])
        resumed = every_second()
        values = state_of(train(resumed, [BackupAndRestore(own_folder)], seed=50))
    for own, value in zip(values, expected, strict=True):
        np.testing.assert_array_equal(own, value)
    every = tfscale.allgather_object(expected[0])
    assert not np.array_equal(every[0], every[1])  # the last epoch is not averaged
    assert resumed.n_averages == whole.n_averages == EPOCHS // 2


@sizes(2, 3, timeout_s=120)
def case_each_ranks_own_model_goes_on():
    """After the first epoch of two between averages: ranks differ, also in their momentum."""
    interrupt_and_go_on(1)


@sizes(2, timeout_s=120)
def case_distances_are_those_from_the_last_average():
    """After the third epoch, with the average of the second as the common parameters."""
    interrupt_and_go_on(3)


class StopAlone(keras.callbacks.Callback):
    """Stops training in the second epoch on one rank: after a step, or where the epoch ends."""

    def __init__(self, rank, step=None):
        super().__init__()
        self.is_mine, self.step, self.epochs = runtime.rank() == rank, step, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        if self.is_mine and (self.epochs[-1], batch) == (1, self.step):
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if self.is_mine and (epoch, None) == (1, self.step):
            self.model.stop_training = True


def stops_everywhere(step):
    """All ranks have ended after the second epoch, with as many averages."""
    for rank in (0, runtime.size() - 1):
        for position in ("before", "after"):
            averaging, alone = ParameterAveraging(), StopAlone(rank, step)
            model = train(averaging, **{position: [alone]})
            assert set(tfscale.allgather_object(averaging.n_averages)) == {2}
            every = tfscale.allgather_object(model.get_weights()[0])
            assert all(np.array_equal(other, every[0]) for other in every)
            forget_the_stop()


@sizes(2, 3, timeout_s=120)
def case_one_rank_stops_where_an_epoch_ends():
    stops_everywhere(None)


@sizes(2, 3, timeout_s=120)
def case_one_rank_stops_amid_an_epoch():
    stops_everywhere(1)


@sizes(2, timeout_s=60)
def case_a_stop_of_one_rank_is_the_end_of_a_backup():
    """The others begin an epoch that does not count, and must not write what they hold in it."""
    folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
    backup = BackupAndRestore(folder, delete_checkpoint=False)
    averaging = ParameterAveraging()
    train(averaging, [backup], [StopAlone(0)])
    assert set(tfscale.allgather_object(averaging.n_averages)) == {2}
    forget_the_stop()
    again = StopAlone(0, step=99)
    train(ParameterAveraging(), [BackupAndRestore(folder)], [again])
    assert set(tfscale.allgather_object(again.epochs[0])) == {2}
