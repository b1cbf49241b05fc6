"""Train from Python generators: endless ones with steps_per_epoch, and one that ends."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(99)


def waves(batch_size, seed):
    """Yield noisy sine waves and their frequencies, for ever."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, 32)
    while True:
        frequency = rng.uniform(1, 5, size=(batch_size, 1))
        wave = np.sin(2 * np.pi * frequency * time) + rng.normal(scale=0.1, size=(1, 32))
        yield wave[..., None], frequency


def some_waves():
    """Yield batches of decreasing size."""
    for batch_size in (9, 8, 7, 2):
        yield next(waves(batch_size, seed=batch_size))


model = keras.Sequential(
    [
        keras.Input(shape=(32, 1)),
        layers.Conv1D(8, 5, strides=2, activation="relu"),
        layers.BatchNormalization(),
        layers.Conv1D(8, 5, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(1),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
model.fit(
    waves(25, seed=1),
    steps_per_epoch=6,
    epochs=3,
    validation_data=waves(10, seed=2),
    validation_steps=2,
    verbose=2,
)
print("one pass over a generator that ends")
model.fit(some_waves(), epochs=1, verbose=2)
print("evaluate:", model.evaluate(waves(15, seed=3), steps=3, verbose=0))
signals, frequencies = next(waves(4, seed=4))
for true, guess in zip(frequencies, model.predict(signals, verbose=0), strict=True):
    print(f"true: {true[0]:.4f} predicted: {guess[0]:.4f}")
model.save_weights("waves.weights.h5")
