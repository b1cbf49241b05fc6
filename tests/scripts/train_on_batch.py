"""A loop of train_on_batch with an own order of the data."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(64)
x = rng.normal(size=(205, 7)).astype("float32")
y = np.stack([np.sin(x[:, 0]), x[:, 1] * x[:, 2]], axis=1).astype("float32")
x_train, y_train, x_test, y_test = x[:170], y[:170], x[170:], y[170:]

inputs = keras.Input(shape=(7,))
h = layers.Dense(20, activation="swish")(inputs)
h = layers.BatchNormalization(momentum=0.8)(h)
h = layers.Dense(20, activation="swish")(h)
model = keras.Model(inputs, layers.Dense(2)(h))
model.compile(
    optimizer=keras.optimizers.Adam(0.01, clipnorm=1.0),
    loss="mse",
    metrics=["mae", "cosine_similarity"],
)

batch_size = 36
losses = []
for epoch in range(4):
    order = rng.permutation(len(x_train))
    model.reset_metrics()
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        weights = 1.0 + (np.abs(x_train[rows, 0]) > 1)
        logs = model.train_on_batch(
            x_train[rows], y_train[rows], sample_weight=weights, return_dict=True
        )
    losses.append(float(logs["loss"]))
    model.reset_metrics()
    test = model.test_on_batch(x_test, y_test)
    values = " - ".join(f"{name}: {float(logs[name]):.6f}" for name in sorted(logs))
    print(f"epoch {epoch + 1} - {values} - test: {float(test[0]):.6f}")

predicted = model.predict_on_batch(x_test)
print("predicted:", predicted.shape, predicted[0])
np.save("predicted.npy", predicted)
np.savetxt("losses.txt", losses)
model.save_weights("by_batches.weights.h5")
