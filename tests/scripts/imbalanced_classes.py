"""Rare positives: class weights, then the same with sample weights."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
x = rng.normal(size=(430, 9)).astype("float32")
risk = x[:, 0] + x[:, 1] * x[:, 2] + rng.normal(scale=0.5, size=430)
y = (risk > 2.0).astype("uint8")[:, None]
x_train, x_test, y_train, y_test = x[:330], x[330:], y[:330], y[330:]

n_negative, n_positive = np.bincount(y_train[:, 0])
print(f"positive: {n_positive} of {len(y_train)}")
class_weight = {0: 1.0 / n_negative, 1: 1.0 / n_positive}
class_weight = {label: weight * len(y_train) / 2 for label, weight in class_weight.items()}


def make_model():
    model = keras.Sequential(
        [
            keras.Input(shape=(9,)),
            layers.Dense(24, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(24, activation="relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss="binary_crossentropy",
        metrics=[
            keras.metrics.TruePositives(name="tp"),
            keras.metrics.FalseNegatives(name="fn"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
        ],
        weighted_metrics=[keras.metrics.BinaryAccuracy(name="weighted_accuracy")],
    )
    return model


print("with class weights")
model = make_model()
model.fit(
    x_train,
    y_train,
    batch_size=64,
    epochs=4,
    validation_data=(x_test, y_test),
    class_weight=class_weight,
    verbose=2,
)

print("with sample weights, which the validation part has too")
weights = np.where(y_train[:, 0] == 1, class_weight[1], class_weight[0])
weights[rng.random(len(weights)) < 0.05] = 0.0
second = make_model()
second.fit(
    x_train,
    y_train,
    sample_weight=weights,
    validation_split=0.25,
    batch_size=50,
    epochs=3,
    verbose=2,
)
test_weights = np.where(y_test[:, 0] == 1, 5.0, 1.0)
print("test:", second.evaluate(x_test, y_test, sample_weight=test_weights, verbose=0))
np.save("risks.npy", model.predict(x_test, verbose=0))
model.save_weights("class_weights.weights.h5")
second.save_weights("sample_weights.weights.h5")
