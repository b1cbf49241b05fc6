"""Knowledge distillation: an own compute_loss, accumulated gradients, eager steps."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(10)
x = np.random.normal(size=(290, 10)).astype("float32")
y = np.argmax(x[:, :3] * x[:, 3:6] + 0.5 * x[:, 6:9], axis=1)


def make_network(width, name):
    return keras.Sequential(
        [
            keras.Input(shape=(10,)),
            layers.Dense(width, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(width, activation="relu", activity_regularizer="l2"),
            layers.Dense(3),
        ],
        name=name,
    )


class Distiller(keras.Model):
    def __init__(self, student, teacher, alpha=0.3, temperature=2.0):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.teacher.trainable = False
        self.alpha = alpha
        self.temperature = temperature

    def call(self, inputs, training=None):
        return self.student(inputs, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        own = super().compute_loss(x, y, y_pred, sample_weight, **kwargs)
        soft_targets = ops.softmax(self.teacher(x, training=False) / self.temperature)
        divergence = keras.losses.kl_divergence(
            soft_targets, ops.softmax(y_pred / self.temperature)
        )
        return self.alpha * own + (1 - self.alpha) * self.temperature**2 * ops.mean(divergence)


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher = make_network(32, "teacher")
teacher.compile(
    optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    loss=loss,
    metrics=["accuracy"],
)
teacher.fit(x, y, batch_size=40, epochs=4, validation_split=0.2, verbose=2)

print("distilling")
distiller = Distiller(make_network(8, "student"), teacher)
distiller.compile(
    optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"], run_eagerly=True
)
distiller.fit(x, y, batch_size=65, epochs=2, validation_split=0.2, verbose=2)
print("student:", distiller.evaluate(x, y, verbose=0))
teacher.save("teacher.keras")
distiller.student.save("student.keras")
