"""Models, data and checks that the cases of callbacks share."""

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import outcome


class Deferred(keras.Model):
    """A subclassed model that knows its shapes from the first batch only."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3, activation="tanh")
        self.normalize = keras.layers.BatchNormalization()
        self.out = keras.layers.Dense(1, activation="sigmoid")

    def call(self, x, training=False):
        return self.out(self.normalize(self.hidden(x), training=training))


def functional(has_statistics=True):
    inputs = keras.Input((3,))
    x = keras.layers.Dense(3, activation="tanh", name="hidden")(inputs)
    if has_statistics:
        x = keras.layers.BatchNormalization(name="normalize")(x)
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="out")(x))


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


def require_error_everywhere(action, text):
    messages = tfscale.allgather_object(outcome(action))
    assert messages[0].startswith("ExchangeError") and text in messages[0], messages
    assert len(set(messages)) == 1, messages
