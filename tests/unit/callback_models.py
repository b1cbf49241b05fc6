"""Models and data that the tests of callbacks share."""

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.models import Deferred, functional  # noqa: F401
from tests.helpers.single_job import single_job  # noqa: F401


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


class TwoOptimizers(keras.Model):
    """A model whose train_step has an optimizer for each of two layers."""

    def __init__(self, rate):
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.second = keras.layers.Dense(1)
        self.others = [keras.optimizers.SGD(rate, momentum=0.5)]

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - tf.cast(y, tf.float32)))
        first, second = self.first.trainable_variables, self.second.trainable_variables
        gradients = tape.gradient(loss, first + second)
        self.optimizer.apply(gradients[:2], first)
        self.others[0].apply(gradients[2:], second)
        return {"loss": loss}
