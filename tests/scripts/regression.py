"""Regression on a table, with an adapted Normalization layer and early stopping."""

import keras
import numpy as np
from keras import layers

# Weight, power, cylinders and year of cars, and the fuel that they need.
rng = np.random.default_rng(2024)
n_cars = 310
weight = rng.normal(1300, 250, n_cars)
power = weight * rng.uniform(0.05, 0.12, n_cars)
cylinders = rng.choice([3, 4, 6, 8], n_cars)
year = rng.integers(1990, 2020, n_cars)
fuel = 0.004 * weight + 0.03 * power + 0.2 * cylinders - 0.08 * (year - 1990)
fuel += rng.normal(0, 0.2, n_cars)
features = np.stack([weight, power, cylinders, year], axis=1).astype("float32")

order = rng.permutation(n_cars)
train, test = order[:250], order[250:]

normalizer = layers.Normalization(axis=-1)
normalizer.adapt(features[train])
print("means:", np.round(np.asarray(normalizer.mean).ravel(), 3))


def build_and_compile(norm):
    model = keras.Sequential(
        [
            norm,
            layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
            layers.BatchNormalization(),
            layers.Dense(16, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(
        loss=keras.losses.Huber(),
        optimizer=keras.optimizers.Adam(0.02),
        metrics=[keras.metrics.RootMeanSquaredError(name="rmse"), keras.metrics.R2Score()],
    )
    return model


model = build_and_compile(normalizer)
stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True)
history = model.fit(
    features[train],
    fuel[train],
    validation_split=0.2,
    batch_size=16,
    epochs=15,
    callbacks=[stop],
    verbose=0,
)
print("epochs:", len(history.epoch), "best:", stop.best_epoch)
for name, values in history.history.items():
    print(f"{name:>15}: {values[0]:.6f} -> {values[-1]:.6f}")
print(model.evaluate(features[test], fuel[test], verbose=0, return_dict=True))
guesses = model.predict(features[test]).flatten()
print("largest error:", float(np.abs(guesses - fuel[test]).max()))
model.save("fuel.keras")
