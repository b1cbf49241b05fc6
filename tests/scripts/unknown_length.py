"""Data whose number of batches is not known: a filter in tf.data, and a generator that ends."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(4)
x = np.random.normal(size=(220, 4)).astype("float32")
y = np.abs(x[:, 0]) + x[:, 1] * x[:, 2]


def is_ordinary(features, target):
    return tf.reduce_max(tf.abs(features)) < 2.0


ordinary = tf.data.Dataset.from_tensor_slices((x, y)).filter(is_ordinary)
train = ordinary.take(120).shuffle(120, seed=3).batch(16)
val = ordinary.skip(120).batch(10)
print("batches of training:", train.cardinality().numpy())

model = keras.Sequential(
    [
        keras.Input(shape=(4,)),
        layers.Dense(16),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.Dense(1),
    ]
)
schedule = keras.optimizers.schedules.ExponentialDecay(0.03, decay_steps=5, decay_rate=0.8)
model.compile(optimizer=keras.optimizers.Adam(schedule), loss="mse", metrics=["mae"])
model.fit(train, validation_data=val, epochs=3, verbose=2)
print("steps:", int(model.optimizer.iterations))
print("learning rate:", float(model.optimizer.learning_rate))


def decreasing():
    for size in (40, 31, 7, 1):
        yield x[:size], y[:size]


model.fit(decreasing(), epochs=1, verbose=2)
print("evaluate:", model.evaluate(decreasing(), verbose=0))
print("predicted:", model.predict(val, verbose=0).shape)
model.save("unknown_length.keras")
