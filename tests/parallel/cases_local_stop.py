"""Where one rank stops, all groups of local SGD stop at the same step, averaged."""

import keras

import tfscale
from tests.helpers.spawn import engine_only, sizes
from tests.parallel.cases_equality import OPTIMIZERS, float64
from tests.parallel.cases_local_sgd import compare, train
from tests.parallel.local_sgd_reference import STEPS, by_hand_for_steps
from tfscale.comm import runtime


def within():
    """Groups of one rank, or of several that share the optimizer's state."""
    return tfscale.Sharded() if tfscale.size() > 2 else "allreduce"


class CountSteps(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1


class StopAt(CountSteps):
    """Stops training after a step, counted over epochs; on the last rank only."""

    def __init__(self, step):
        super().__init__()
        self.last = step

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if self.steps == self.last and tfscale.rank() == tfscale.size() - 1:
            self.model.stop_training = True


class StopBetween(CountSteps):
    """Stops training at the end of the first epoch, on rank 0 only."""

    def on_epoch_end(self, epoch, logs=None):
        if tfscale.rank() == 0:
            self.model.stop_training = True


def forget_the_stop():
    """Let a `fit` without callbacks of tfscale come next: with one, `fit` does this itself."""
    runtime.backend().drain()
    tfscale.barrier()
    runtime.start_incarnation()


def ends_at(interval, n_steps, callback):
    """All ranks have made so many steps and hold the average of groups that did."""
    strategy = tfscale.LocalSGD(2, interval, within())
    model = train(OPTIMIZERS["momentum"], strategy, 3, callbacks=[callback])
    assert set(tfscale.allgather_object(callback.steps)) == {n_steps}
    compare(model, by_hand_for_steps(n_steps, interval, 2))
    forget_the_stop()


@engine_only("ranks ask each other before each step, and stop at once")
@sizes(2, 4, timeout_s=200)
def case_a_stop_amid_an_interval_waits_for_the_average():
    with float64():
        ends_at(4, 4, StopAt(3))
        ends_at(4, 8, StopAt(4))  # too late for that average
        ends_at(7, 14, StopAt(12))  # an interval over two epochs


@engine_only("ranks ask each other before each step, and stop at once")
@sizes(2, 4, timeout_s=120)
def case_a_stop_waits_no_longer_than_the_epoch():
    with float64():
        ends_at(7, STEPS, StopAt(8))


@sizes(2, 4, timeout_s=120)
def case_one_rank_stops_between_epochs():
    """The others do not begin the next one, in whose first steps they would be alone."""
    with float64():
        counted = StopBetween()
        strategy = tfscale.LocalSGD(2, 7, within())
        model = train(OPTIMIZERS["momentum"], strategy, 3, callbacks=[counted])
        assert counted.steps == STEPS + (tfscale.rank() != 0)  # Keras counts what is given up
        compare(model, by_hand_for_steps(STEPS, 7, 2))
        forget_the_stop()
