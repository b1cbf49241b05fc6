"""A convolutional autoencoder with sparse codes that removes noise from pictures."""

import keras
import numpy as np
from keras import layers, regularizers

keras.utils.set_random_seed(1)


def make_pictures(count):
    """Blurred dots on black, values from 0 to 1."""
    rows, columns = np.mgrid[0:16, 0:16]
    centers = np.random.uniform(4, 12, size=(count, 2, 1, 1))
    distance = (rows - centers[:, 0]) ** 2 + (columns - centers[:, 1]) ** 2
    return np.exp(-distance / 8.0)[..., None].astype("float32")


clean = make_pictures(230)
noisy = np.clip(clean + np.random.normal(scale=0.25, size=clean.shape), 0, 1).astype("float32")
x_train, x_test = noisy[:190], noisy[190:]
y_train, y_test = clean[:190], clean[190:]

# Encoder
inputs = keras.Input(shape=(16, 16, 1))
x = layers.Conv2D(8, 3, padding="same")(inputs)
x = layers.BatchNormalization()(x)
x = layers.LeakyReLU(negative_slope=0.1)(x)
x = layers.MaxPooling2D(2)(x)
x = layers.Conv2D(
    4, 3, padding="same", activation="relu", activity_regularizer=regularizers.L1(1e-4)
)(x)
code = layers.MaxPooling2D(2, name="code")(x)

# Decoder
x = layers.Conv2DTranspose(8, 3, strides=2, padding="same")(code)
x = layers.BatchNormalization()(x)
x = layers.ReLU()(x)
x = layers.UpSampling2D(2)(x)
outputs = layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x)

autoencoder = keras.Model(inputs, outputs, name="autoencoder")
autoencoder.compile(optimizer="adam", loss="binary_crossentropy", metrics=["mse"])
autoencoder.summary()

history = autoencoder.fit(
    x_train, y_train, batch_size=32, epochs=4, shuffle=True, validation_data=(x_test, y_test)
)
print("losses:", [round(value, 6) for value in history.history["loss"]])

restored = autoencoder.predict(x_test)
print("error of the input:", float(np.mean((x_test - y_test) ** 2)))
print("error of the output:", float(np.mean((restored - y_test) ** 2)))

encoder = keras.Model(inputs, code)
codes = encoder.predict(x_test, batch_size=7, verbose=0)
print("codes:", codes.shape, "mean", float(codes.mean()))
np.save("codes.npy", codes)
autoencoder.save("autoencoder.keras")
