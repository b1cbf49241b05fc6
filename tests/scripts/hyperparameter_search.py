"""Try several settings in one process and keep the best model."""

import csv
import itertools

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(12)
x = rng.normal(size=(260, 10)).astype("float32")
y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype("float32")
x_train, y_train, x_test, y_test = x[:200], y[:200], x[200:], y[200:]


def build(units, rate, normalize):
    model = keras.Sequential([keras.Input(shape=(10,))])
    for _ in range(2):
        model.add(layers.Dense(units, kernel_initializer="he_normal"))
        if normalize:
            model.add(layers.BatchNormalization())
        model.add(layers.Activation("relu"))
    model.add(layers.Dense(1, activation="sigmoid"))
    model.compile(keras.optimizers.RMSprop(rate), "binary_crossentropy", metrics=["accuracy"])
    return model


rows = []
best_loss, best_settings = np.inf, None
for units, (rate, normalize) in itertools.product((8, 16), ((0.01, True), (0.02, False))):
    keras.backend.clear_session()
    keras.utils.set_random_seed(units)
    model = build(units, rate, normalize)
    history = model.fit(x_train, y_train, batch_size=33, epochs=3, validation_split=0.2, verbose=0)
    val_loss = min(history.history["val_loss"])
    print(f"units={units} rate={rate} normalize={normalize} - val_loss: {val_loss:.6f}")
    rows.append([units, rate, normalize, val_loss])
    if val_loss < best_loss:
        best_loss, best_settings = val_loss, (units, rate, normalize)
        model.save("best.keras")

with open("search.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["units", "rate", "normalize", "val_loss"])
    writer.writerows(rows)

print("best settings:", best_settings)
best = keras.models.load_model("best.keras")
print("test:", best.evaluate(x_test, y_test, batch_size=13, verbose=0))
