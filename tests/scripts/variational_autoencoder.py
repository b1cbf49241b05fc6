"""A variational autoencoder: a sampling layer, and a train_step with two losses."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LATENT = 2


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        epsilon = keras.random.normal(shape=ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


encoder_inputs = keras.Input(shape=(12, 12, 1))
x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
x = layers.BatchNormalization()(x)
x = layers.Flatten()(x)
z_mean = layers.Dense(LATENT, name="z_mean")(x)
z_log_var = layers.Dense(LATENT, name="z_log_var")(x)
encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])])

latent_inputs = keras.Input(shape=(LATENT,))
x = layers.Dense(6 * 6 * 8, activation="relu")(latent_inputs)
x = layers.Reshape((6, 6, 8))(x)
x = layers.Conv2DTranspose(1, 3, activation="sigmoid", strides=2, padding="same")(x)
decoder = keras.Model(latent_inputs, x)


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.trackers = [keras.metrics.Mean(name=n) for n in ("loss", "reconstruction", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            errors = keras.losses.binary_crossentropy(data, self.decoder(z))
            reconstruction = ops.mean(ops.sum(errors, axis=(1, 2)))
            kl = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = reconstruction + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.trackers, (loss, reconstruction, kl), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


rows, columns = np.mgrid[0:12, 0:12]
angles = np.random.uniform(0, np.pi, size=(230, 1, 1))
lines = np.cos(angles) * (rows - 6) + np.sin(angles) * (columns - 6)
pictures = (np.abs(lines) < 1.5).astype("float32")[..., None]

vae = VAE(encoder, decoder)
vae.compile(optimizer=keras.optimizers.Adam(5e-3))
vae.fit(pictures, epochs=4, batch_size=48, verbose=2)
means, _, _ = vae.encoder.predict(pictures[:9], verbose=0)
print("codes:", means[0], means[-1])
print("brightness:", vae.decoder.predict(means, verbose=0).mean(axis=(1, 2, 3))[:4])
encoder.save_weights("encoder.weights.h5")
decoder.save("decoder.keras")
