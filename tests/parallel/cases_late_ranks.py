"""Two optimizers, a synchronised normalisation and a collective of the user's, with late ranks."""

import random
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.parallel.fit_model import assert_equal_on_all_ranks, callbacks, samples, weights


class TwoOptimizers(keras.Model):
    """Two players, a synchronised normalisation, and a collective of the user's own."""

    def __init__(self, delays: random.Random):
        super().__init__()
        self.first = keras.layers.Dense(8)
        self.norm = tfscale.SyncBatchNormalization()
        self.second = keras.layers.Dense(1)
        self.other = hvd.DistributedOptimizer(
            keras.optimizers.Adam(1e-3), exchange=tfscale.Allreduce(bucket_mb=0)
        )
        self.delays = delays

    def call(self, inputs, training=False):
        hidden = self.late(self.first(inputs)) if training else self.first(inputs)
        return self.second(self.norm(hidden, training=training))

    def late(self, tensor):
        def wait(value):
            time.sleep(self.delays.random() * 0.004)
            return value

        @tf.custom_gradient
        def waited(tensor):
            result = tf.numpy_function(wait, [tensor], tensor.dtype)
            return tf.ensure_shape(result, tensor.shape), lambda upstream: upstream

        return waited(tensor)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        mean_loss = tfscale.allreduce(self.late(loss), name="loss")
        normalized = [*self.first.trainable_variables, *self.norm.trainable_variables]
        shares = ((self.optimizer, self.second.trainable_variables), (self.other, normalized))
        for optimizer, variables in shares:
            gradients = tape.gradient(loss, [v.value for v in variables])
            optimizer.apply([self.late(g) for g in gradients], variables)
        return {"loss": mean_loss}


@sizes(2, 3, 4, timeout_s=150)
def case_two_optimizers_and_delays():
    """200 steps; ranks are late at random places, never in the same order."""
    keras.utils.set_random_seed(5)
    model = TwoOptimizers(random.Random(tfscale.rank()))
    x = samples(800 * tfscale.size())[0].astype("float32")
    y = x.sum(axis=1, keepdims=True)
    before = float(np.mean((model(x) - y) ** 2))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1e-2), exchange=tfscale.Allreduce(bucket_mb=0)
    )
    model.compile(optimizer=optimizer)
    data = tfscale.data.GlobalBatches(x, y, batch_size=8 * tfscale.size(), seed=1)
    history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks())
    assert int(model.optimizer.iterations) == 200
    assert int(model.other.iterations) == 200
    assert_equal_on_all_ranks([*weights(model), *[v.numpy() for v in model.other.variables]])
    assert_equal_on_all_ranks(history.history["loss"])
    assert float(np.mean((model(x) - y) ** 2)) < 0.8 * before
