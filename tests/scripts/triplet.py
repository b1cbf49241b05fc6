"""A siamese network that learns distances between pictures from triplets."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, metrics, ops

keras.utils.set_random_seed(3)
SIDE = 14


def draw(kinds):
    """Pictures with a horizontal or a vertical line, or a diagonal one, at a random place."""
    images = np.random.normal(scale=0.3, size=(len(kinds), SIDE, SIDE, 1)).astype("float32")
    diagonal = np.arange(SIDE)
    for image, kind in zip(images, kinds, strict=True):
        place = np.random.randint(SIDE)
        rows = diagonal if kind else place
        columns = {0: diagonal, 1: place, 2: (diagonal + place) % SIDE}[kind]
        image[rows, columns] += 1
    return images


def make_triplets(count):
    kinds = np.random.randint(3, size=count)
    others = (kinds + np.random.randint(1, 3, size=count)) % 3
    return tf.data.Dataset.from_tensor_slices((draw(kinds), draw(kinds), draw(others)))


class SiameseModel(keras.Model):
    def __init__(self, embedding, margin=0.5):
        super().__init__()
        self.embedding = embedding
        self.margin = margin
        self.loss_tracker = metrics.Mean(name="loss")
        self.order_tracker = metrics.Mean(name="ordered")

    @property
    def metrics(self):
        return [self.loss_tracker, self.order_tracker]

    def call(self, inputs, training=False):
        anchor, positive, negative = (self.embedding(x, training=training) for x in inputs)
        near = ops.sum(ops.square(anchor - positive), -1)
        far = ops.sum(ops.square(anchor - negative), -1)
        return near, far

    def measure(self, near, far):
        loss = ops.mean(ops.maximum(near - far + self.margin, 0.0))
        self.loss_tracker.update_state(loss)
        self.order_tracker.update_state(near < far)
        return loss

    def train_step(self, data):
        with tf.GradientTape() as tape:
            near, far = self(data, training=True)
            loss = self.measure(near, far)
        gradients = tape.gradient(loss, self.embedding.trainable_weights)
        self.optimizer.apply(gradients, self.embedding.trainable_weights)
        return {"loss": self.loss_tracker.result(), "ordered": self.order_tracker.result()}

    def test_step(self, data):
        self.measure(*self(data, training=False))
        return {"loss": self.loss_tracker.result(), "ordered": self.order_tracker.result()}


embedding = keras.Sequential(
    [
        keras.Input(shape=(SIDE, SIDE, 1)),
        layers.Conv2D(8, 3, strides=2, activation="relu"),
        layers.BatchNormalization(),
        layers.Conv2D(12, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(8),
    ]
)
siamese = SiameseModel(embedding)
siamese.compile(optimizer=keras.optimizers.Adam(5e-3))
train_dataset = make_triplets(120).shuffle(120).batch(16).prefetch(2)
siamese.fit(train_dataset, epochs=4, validation_data=make_triplets(30).batch(16), verbose=2)

anchor, same, different = (embedding(draw(kind)) for kind in ([0], [0], [2]))
cosine = metrics.CosineSimilarity()
print("near:", float(cosine(anchor, same)))
cosine.reset_state()
print("far:", float(cosine(anchor, different)))
embedding.save("embedding.keras")
