"""Models that local SGD trains in `fit`, and what stops a rank."""

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.helpers.equality import OPTIMIZERS
from tests.parallel.local_sgd_reference import compare, train, train_by_hand
from tfscale.testing import inspect

SGD, Dense = keras.optimizers.SGD, keras.layers.Dense
LocalSGD = tfscale.LocalSGD


def model_of(layers):
    """Return a model of the layers that a function makes, which draw from the seed."""
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((2,)), *layers()])


def own_fit(model, optimizer, *callbacks, epochs=1):
    """Train a model of the caller's on 8 steps of 24 samples; return it."""
    x = np.random.default_rng(4).normal(size=(192, 2))
    model.compile(optimizer, "mse")
    data = tfscale.data.GlobalBatches(x, x[:, :1], batch_size=24, shuffle=False)
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    return model


def start(**options):
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0, **options)


def distributed(rule, strategy):
    return hvd.DistributedOptimizer(rule, exchange=strategy)


def within():
    """Groups of one rank, or of several that share the optimizer's state."""
    return tfscale.Sharded() if tfscale.size() > 2 else "allreduce"


class StopAt(keras.callbacks.Callback):
    """Stops training after a step, counted over epochs, on the last rank; counts steps.

    None stops it on rank 0, at the end of the first epoch.
    """

    def __init__(self, step=None):
        super().__init__()
        self.last, self.steps = step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.last and tfscale.rank() == tfscale.size() - 1:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if self.last is None and tfscale.rank() == 0:
            self.model.stop_training = True


def forget_the_stop():
    """Let a `fit` without callbacks of tfscale come next: with one, `fit` does this itself."""
    inspect.wait_for_gathers()
    tfscale.barrier()
    inspect.return_to_steps()


def ends_at(interval, n_steps, callback, **options):
    """All ranks have made so many steps and hold the average of groups that did."""
    strategy = tfscale.LocalSGD(2, interval, within(), **options)
    model = train("momentum", strategy, 3, callbacks=[callback])
    assert set(tfscale.allgather_object(callback.steps)) == {n_steps}
    compare(model, train_by_hand(OPTIMIZERS["momentum"], 2, interval, n_steps, **options))
    forget_the_stop()
