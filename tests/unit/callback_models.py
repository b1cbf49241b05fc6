"""Models and data that the tests of callbacks share."""

import keras
import numpy as np

from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401


class Deferred(keras.Model):
    """A subclassed model that knows its shapes from the first batch only."""

    def __init__(self, units=2):
        super().__init__()
        self.hidden = keras.layers.Dense(units, name="hidden")
        self.normalize = keras.layers.BatchNormalization(name="normalize")
        self.out = keras.layers.Dense(1, name="out")

    def call(self, x, training=False):
        return self.out(self.normalize(self.hidden(x), training=training))


def functional():
    inputs = keras.Input((3,))
    x = keras.layers.Dense(2, name="hidden")(inputs)
    x = keras.layers.BatchNormalization(name="normalize")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(x))


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
