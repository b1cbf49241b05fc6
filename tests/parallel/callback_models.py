"""Models, data and checks that the cases of callbacks share."""

import keras
import numpy as np

import tfscale
from tests.helpers.models import Deferred, functional  # noqa: F401


def compiled(model, optimizer=None, metrics=()):
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        tfscale.DistributedOptimizer(optimizer), "binary_crossentropy", metrics=list(metrics)
    )
    return model


def data(samples, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 3)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + rng.normal(size=(samples, 1)) > 0).astype("float32")
    return x, y


def fit(model, arrays, callbacks, epochs=2, **options):
    x, y = arrays
    options = {"batch_size": len(x) // 2, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **options).history


def own(samples=8):
    return data(samples, 100 + tfscale.rank())
