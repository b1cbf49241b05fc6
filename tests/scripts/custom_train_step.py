"""Override train_step and test_step: a regression with a loss and metrics of one's own."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class RobustRegression(keras.Model):
    """Mean of log(cosh(error)), plus the mean absolute error as a metric."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(24)
        self.normalization = layers.BatchNormalization()
        self.out = layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x, training=False):
        x = self.normalization(self.hidden(x), training=training)
        return self.out(ops.tanh(x))

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def robust_loss(self, y, y_pred):
        error = ops.cast(y, y_pred.dtype) - y_pred
        return ops.mean(error + ops.softplus(-2.0 * error) - math.log(2.0))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.robust_loss(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.robust_loss(y, y_pred))
        self.mae_metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


x = np.random.normal(size=(260, 6))
y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + np.random.standard_t(2, size=(260, 1)) * 0.1

model = RobustRegression()
model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))
model.fit(x[:200], y[:200], batch_size=30, epochs=4, validation_data=(x[200:], y[200:]), verbose=2)
print("evaluate:", [float(value) for value in model.evaluate(x[200:], y[200:], verbose=0)])
print("prediction:", model.predict(x[:3], verbose=0).ravel())
model.save_weights("robust.weights.h5")
