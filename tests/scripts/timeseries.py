"""Forecast temperatures with windows of a time series."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(31)
hours = np.arange(900)
temperature = 10 + 8 * np.sin(hours * 2 * np.pi / 24) + 0.01 * hours + rng.normal(size=900)
pressure = 1000 + 5 * np.cos(hours * 2 * np.pi / 72) + rng.normal(size=900)
raw = np.stack([temperature, pressure], axis=1)

n_train, n_val = 500, 200
mean, std = raw[:n_train].mean(axis=0), raw[:n_train].std(axis=0)
values = (raw - mean) / std

past, future, step = 48, 12, 4


def windows(first, last, shuffle):
    return keras.utils.timeseries_dataset_from_array(
        values[first:last],
        targets=values[first + past + future : last, 0],
        sequence_length=past // step,
        sampling_rate=step,
        sequence_stride=3,
        batch_size=32,
        shuffle=shuffle,
        seed=1 if shuffle else None,
    )


dataset_train = windows(0, n_train, shuffle=True)
dataset_val = windows(n_train, n_train + n_val, shuffle=False)
dataset_test = windows(n_train + n_val, len(values), shuffle=False)
for batch_inputs, batch_targets in dataset_train.take(1):
    print("input:", batch_inputs.shape, "target:", batch_targets.shape)

inputs = keras.Input(shape=(past // step, 2))
x = layers.LSTM(12, return_sequences=True)(inputs)
x = layers.BatchNormalization()(x)
x = layers.GRU(8)(x)
outputs = layers.Dense(1)(x)
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")

callbacks = [
    keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=2),
    keras.callbacks.ModelCheckpoint(
        "best.weights.h5",
        monitor="val_loss",
        save_weights_only=True,
        save_best_only=True,
        verbose=1,
    ),
]
history = model.fit(
    dataset_train, epochs=5, validation_data=dataset_val, callbacks=callbacks, verbose=2
)
print("validation losses:", [f"{value:.6f}" for value in history.history["val_loss"]])
model.load_weights("best.weights.h5")
print("test loss:", model.evaluate(dataset_test, verbose=0))
for x, y in dataset_test.take(1):
    prediction = model.predict(x, verbose=0)[0, 0]
    print(f"true: {y.numpy()[0] * std[0] + mean[0]:.4f}, predicted: {prediction:.4f}")
np.save("forecast.npy", model.predict(dataset_test, verbose=0))
