"""A small model in one process that is trained with checkpoints, for tests."""

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.ranks import Interruption
from tfscale import preemption
from tfscale.callbacks import BroadcastGlobalVariablesCallback
from tfscale.checkpoints import list_checkpoints
from tfscale.data import GlobalBatches

STEPS, BATCH = 4, 8


@pytest.fixture(autouse=True)
def job():
    tfscale.init()
    yield
    preemption.forget_request()


def arrays():
    random = np.random.default_rng(3)
    return random.normal(size=(STEPS * BATCH, 3)), random.normal(size=(STEPS * BATCH, 2))


def build(units=5, is_built=True, **options):
    keras.utils.set_random_seed(1)
    first = [keras.Input((3,))] if is_built else []
    layers = [*first, keras.layers.Dense(units), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.Adam(0.01))
    # Eager steps: nothing to trace, which would be most of the time of these tests.
    model.compile(optimizer, "mse", metrics=["mae"], **{"run_eagerly": True, **options})
    return model


def values_of(model):
    return [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]


def require_equal(model, other):
    for own, theirs in zip(values_of(model), values_of(other), strict=True):
        np.testing.assert_array_equal(own, theirs)


class Act(keras.callbacks.Callback):
    def __init__(self, step, action):
        super().__init__()
        self.left, self.action, self.batches = step, action, []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)
        if self.left == 0:
            self.action()
        self.left -= 1


def interrupt():
    raise Interruption


def fit(first, act=None, model=None, epochs=3, data=None, more=()):
    """Train, with a callback or a list of them in front; return model and numbers of the steps."""
    model = model or build()
    data = data if data is not None else GlobalBatches(*arrays(), batch_size=BATCH, seed=2)
    act = act or Act(-1, interrupt)
    first = first if isinstance(first, list) else [first] if first else []
    callbacks = [*first, BroadcastGlobalVariablesCallback(0), *more, act]
    try:
        model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    except Interruption:
        for checkpoint in first:
            if isinstance(checkpoint, tfscale.callbacks.Checkpoint):
                checkpoint._saver.wait()
                checkpoint._handler.remove()
    return model, act.batches


def steps_in(folder):
    return [found.step for found in list_checkpoints(folder) if found.is_finished]
