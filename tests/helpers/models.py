"""Models that tests with and without ranks train."""

import keras
import numpy as np


class Deferred(keras.Model):
    """A subclassed model that knows its shapes from the first batch only."""

    def __init__(self, units=2):
        super().__init__()
        self.hidden = keras.layers.Dense(units, activation="tanh", name="hidden")
        self.normalize = keras.layers.BatchNormalization(name="normalize")
        self.out = keras.layers.Dense(1, activation="sigmoid", name="out")

    def call(self, x, training=False):
        return self.out(self.normalize(self.hidden(x), training=training))


def functional(has_statistics=True):
    inputs = keras.Input((3,))
    x = keras.layers.Dense(2, activation="tanh", name="hidden")(inputs)
    if has_statistics:
        x = keras.layers.BatchNormalization(name="normalize")(x)
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="out")(x))


class Recorder(keras.Model):
    def __init__(self, **compile_options):
        super().__init__()
        self.trained, self.tested = [], []
        self.compile(run_eagerly=True, **compile_options)

    def train_step(self, data):
        self.trained.append(tuple(data[0].numpy().astype(int)))
        return {"loss": 0.0}

    def test_step(self, data):
        self.tested.append(tuple(data[0].numpy().astype(int)))
        return {"loss": 0.0}


def classifier(wrap=lambda optimizer: optimizer):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), loss)
    return model


LINE = np.linspace(-1.0, 1.0, 8, dtype="float32").reshape(8, 1)


def line_model():
    """Return a model with one input and one output, for `LINE`."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
