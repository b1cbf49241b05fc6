"""Models and data that the tests of callbacks share."""

import keras
import numpy as np

from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401
from tests.helpers.models import Deferred, functional  # noqa: F401


def compiled(model, rate=0.1, optimizer=None):
    model.compile(optimizer or keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def data(seed, samples=8):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 3)).astype("float32"), rng.normal(size=(samples, 1))


def fit(model, callbacks, seed=0, epochs=1, **options):
    x, y = data(seed)
    return model.fit(
        x, y, batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks, **options
    )
