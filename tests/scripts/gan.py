"""A generative adversarial network: two networks, two optimizers, one subclassed model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LATENT = 4

discriminator = keras.Sequential(
    [
        keras.Input(shape=(2,)),
        layers.GaussianNoise(0.05),
        layers.Dense(32),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Dense(32),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Dense(1),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input(shape=(LATENT,)),
        layers.Dense(32),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Dense(2),
    ],
    name="generator",
)


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.noise = keras.random.SeedGenerator()
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        count = ops.shape(real)[0]
        fake = self.generator(keras.random.normal((count, LATENT), seed=self.noise))
        points = ops.concatenate([fake, ops.cast(real, fake.dtype)], axis=0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(points))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        latent = keras.random.normal((count, LATENT), seed=self.noise)
        with tf.GradientTape() as tape:
            verdict = self.discriminator(self.generator(latent, training=True))
            g_loss = self.loss_fn(ops.zeros((count, 1)), verdict)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


angles = np.random.uniform(0, 2 * np.pi, size=500)
circle = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(circle).shuffle(500).batch(64)

gan = GAN(discriminator, generator)
gan.compile(
    d_optimizer=keras.optimizers.Adam(2e-3, beta_1=0.5),
    g_optimizer=keras.optimizers.Adam(2e-3, beta_1=0.5),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
gan.fit(dataset, epochs=8, verbose=2)
generator.save("generator.keras")
discriminator.save("discriminator.keras")
