"""A small model in one process that is trained with checkpoints, for tests."""

import os
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.ranks import Interruption
from tfscale import preemption
from tfscale.callbacks import BroadcastGlobalVariablesCallback, Checkpoint
from tfscale.checkpoints import list_checkpoints
from tfscale.data import GlobalBatches
from tfscale.testing import require_identical

STEPS, BATCH = 4, 8


@pytest.fixture(autouse=True)
def job():
    tfscale.init()
    yield
    preemption.forget_request()


def arrays():
    draw = np.random.default_rng(3).normal
    return draw(size=(STEPS * BATCH, 3)), draw(size=(STEPS * BATCH, 2))


def dataset(is_counted=True):
    """Return the same data of a length that Keras knows, or does not know."""
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    return data if is_counted else data.filter(lambda *_: True)


def build(units=5, is_built=True, optimizer=None, nonfinite="warn", **options):
    keras.utils.set_random_seed(1)
    first = [keras.Input((3,))] if is_built else []
    layers = [*first, keras.layers.Dense(units), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    optimizer = tfscale.DistributedOptimizer(optimizer, nonfinite=nonfinite)
    # Eager steps: nothing to trace, which would be most of the time of these tests.
    model.compile(optimizer, "mse", metrics=["mae"], **{"run_eagerly": True, **options})
    return model


def values_of(model):
    return [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]


def require_equal(model, other):
    require_identical(values_of(model), values_of(other))


class Act(keras.callbacks.Callback):
    def __init__(self, step, action):
        super().__init__()
        self.left, self.action, self.batches = step, action, []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)
        if self.left == 0:
            self.action()
        self.left -= 1


class Count(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.n, self.restored_at = 0, None

    def on_epoch_end(self, epoch, logs=None):
        self.n += 1

    def backup_state(self):
        return {"n": self.n}

    def restore_state(self, state, epoch):
        self.n, self.restored_at = state["n"], epoch


def interrupt():
    raise Interruption


def fit(first, act=None, model=None, epochs=3, data=None, more=(), **options):
    """Train, with a callback or a list of them in front; return model and numbers of the steps."""
    model = model or build()
    data = data if data is not None else GlobalBatches(*arrays(), batch_size=BATCH, seed=2)
    act = act or Act(-1, interrupt)
    first = first if isinstance(first, list) else [first] if first else []
    callbacks = [*first, BroadcastGlobalVariablesCallback(0), *more, act]
    try:
        data = data if isinstance(data, dict) else {"x": data}
        model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    except Interruption:
        for checkpoint in first:
            if isinstance(checkpoint, Checkpoint):
                checkpoint._saver.wait()
                checkpoint._handler.remove()
    return model, act.batches


def steps_in(folder):
    return [found.step for found in list_checkpoints(folder) if found.is_finished]


def resume(folder, stop, every=1, model=build, data=lambda: None, front=(), **options):
    """Require that a run cut before a step ends bit by bit as a whole one; return its rest."""

    def run(*own, act=None):
        return fit([*front, *own], act, model(), data=data(), **options)

    whole, numbers = run()
    run(Checkpoint(folder, every), act=Act(stop, interrupt))
    resumed, rest = run(Checkpoint(folder, every))
    require_equal(resumed, whole)
    assert rest == numbers[stop:], stop
    losses = resumed.history.history["loss"]
    assert losses == whole.history.history["loss"][-len(losses) :]
    return rest


def info_of(step, size=2, run="0123abcd", weights=()):
    """Return the content of a snapshot of a model with these weights, without optimizer."""
    of_numpy = np.random.RandomState(1).get_state(legacy=False)
    of_numpy["state"]["key"] = of_numpy["state"]["key"].tolist()
    return {
        "run": run,
        "step": step,
        "size": size,
        "groups": [list(range(size))],
        "position": {"epoch": 0, "step": step, "n_steps": step, "data": None},
        "is_end": False,
        "random": {"python": random.Random(1).getstate(), "numpy": of_numpy, "keras": None},
        "weights": [[name, list(value.shape)] for name, value in weights],
        "rules": [],
        "trained": [],
        "ranges": {},
        "accumulated": [],
        "residuals": {},
        "n_quantized": [],
        "hosts": [0, 0, 1],
        "metrics": [],
        "callbacks": [],
        "keras_callbacks": [],
    }


def refuse(monkeypatch, number, *paths):
    """Let no folder of these be listed, and no file of these be opened."""
    for owner, name in ((os, "listdir"), (os, "scandir"), (os, "open")):
        usual = getattr(owner, name)

        def refusing(path=".", *arguments, usual=usual, **options):
            if str(path) in map(str, paths):
                raise OSError(number, os.strerror(number))
            return usual(path, *arguments, **options)

        monkeypatch.setattr(owner, name, refusing)
