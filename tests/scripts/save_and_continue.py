"""Save a model with a layer of one's own, load it, and train further with its optimizer's state."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(23)


@keras.saving.register_keras_serializable("shapes")
class Maxout(layers.Layer):
    """The larger one of two dense layers."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units, 2), name="kernel")
        self.bias = self.add_weight(shape=(self.units, 2), initializer="zeros", name="bias")

    def call(self, x):
        return ops.max(ops.tensordot(x, self.kernel, axes=1) + self.bias, axis=-1)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


x = np.random.uniform(-1, 1, size=(340, 2))
y = (np.hypot(x[:, 0], x[:, 1]) < 0.7).astype("int32")

model = keras.Sequential(
    [Maxout(12), layers.BatchNormalization(), Maxout(8), layers.Dense(2, activation="softmax")]
)
model.compile(
    optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 20, 0.9)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(x, y, batch_size=48, epochs=2, validation_split=0.15, verbose=2)
before = model.predict(x[:50], verbose=0)
model.save("shapes.keras")
model.save_weights("shapes.weights.h5")

loaded = keras.saving.load_model("shapes.keras")
np.testing.assert_allclose(loaded.predict(x[:50], verbose=0), before, atol=1e-6)
print("loaded after", int(loaded.optimizer.iterations), "steps")
loaded.fit(x, y, batch_size=48, initial_epoch=2, epochs=4, validation_split=0.15, verbose=2)
loaded.save("shapes_2.keras")

# The same layers from their configuration, with the weights of the first save.
copy = keras.Sequential.from_config(model.get_config())
copy.build((None, 2))
copy.load_weights("shapes.weights.h5")
copy.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
print("copy:", copy.evaluate(x, y, verbose=0))
print("loaded:", loaded.evaluate(x, y, verbose=0))
