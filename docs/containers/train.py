"""A Keras script that knows nothing of tfscale, for trying an image or a cluster."""

import keras
import numpy as np

random = np.random.default_rng(0)
inputs = random.normal(size=(4096, 20))
targets = inputs @ random.normal(size=(20, 1))

model = keras.Sequential(
    [keras.Input((20,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
)
model.compile("adam", "mse")
model.fit(inputs, targets, batch_size=64, epochs=3, validation_split=0.2, verbose=2)
