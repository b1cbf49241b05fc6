"""A small float64 model, trained sharded and in one process, for tests that compare the two."""

import keras
import numpy as np

import tfscale
from tests.helpers.equality import BATCH, LAYERWISE, OPTIMIZERS, dense_model
from tests.helpers.equality import check as check_whole
from tests.helpers.versions import HAS_MUON
from tfscale.callbacks import Callback
from tfscale.testing import require_close

Adam = keras.optimizers.Adam
N_STEPS = 6


def sharded(inner, **options):
    return tfscale.DistributedOptimizer(inner, exchange=tfscale.Sharded(), **options)


def data(n_steps=N_STEPS, seed=7):
    random = np.random.default_rng(seed)
    return random.normal(size=(BATCH * n_steps, 6)), random.normal(size=(BATCH * n_steps, 3))


def compiled(optimizer, seed=3, **options):
    keras.utils.set_random_seed(seed)
    model = dense_model()
    model.compile(optimizer, "mse", **options)
    return model


def state_of(model):
    """Return copies of weights and optimizer state of a model in one process."""
    return [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]


def single_steps(model, first=0, stop=N_STEPS):
    """Train plain Keras on the global batches that `fit` gives the ranks."""
    x, y = data()
    for step in range(first, stop):
        model.train_on_batch(x[step * BATCH :][:BATCH], y[step * BATCH :][:BATCH])
    return model


def alone(steps):
    """Train plain Keras on global batches; return the model and its state before each step."""
    model = compiled(Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    states = []
    for step in range(steps):
        states.append(state_of(model))
        single_steps(model, step, step + 1)
    return model, [*states, state_of(model)]


def fit(model, first, stop, callbacks=(), **options):
    x, y = (values[first * BATCH : stop * BATCH] for values in data())
    batches = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    return model.fit(batches, verbose=0, callbacks=[*callbacks, Callback()], **options)


def require_near(values, expected, what=""):
    require_close(values, expected, message=str(what))


def require_state(model, expected, what=""):
    values = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
    require_near(values, expected, what)


SHARDED = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    **({"muon": lambda: keras.optimizers.Muon(0.01)} if HAS_MUON else {}),
    **LAYERWISE,
    **OPTIMIZERS,
}


def check(build, make_optimizer, strategy=None, local_build=None, **options) -> None:
    """Train sharded and in one process; compare weights and the optimizer's complete state."""
    check_whole(build, make_optimizer, strategy or tfscale.Sharded(), local_build, **options)
