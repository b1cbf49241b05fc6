"""Layers on two devices: an embedding and the first dense layer, then the rest of the model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

words = np.random.default_rng(1).integers(0, 50, (240, 6))
y = (words > 25).mean(axis=1, keepdims=True)

inputs = keras.Input((6,), dtype="int32")
hidden = layers.Dense(12, activation="tanh")(layers.Embedding(50, 8)(inputs))
with tf.device("CPU:1"):
    hidden = layers.Dense(16, activation="tanh")(layers.Flatten()(hidden))
    outputs = layers.Dense(1)(hidden)
model = keras.Model(inputs, outputs)
print("devices:", sorted({variable.value.device[-5:] for variable in model.trainable_variables}))

model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(words[:200], y[:200], batch_size=20, epochs=3, validation_split=0.1, verbose=2)
print("evaluate:", model.evaluate(words[200:], y[200:], verbose=0))
