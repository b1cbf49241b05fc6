"""Predict in several ways: arrays, datasets, single batches and parts of a model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(77)
x = np.random.uniform(-2, 2, size=(157, 3)).astype("float32")
y = {"sum": x.sum(axis=1, keepdims=True), "largest": x.argmax(axis=1)}

inputs = keras.Input(shape=(3,), name="point")
h = layers.Dense(16, activation="relu")(inputs)
features = layers.BatchNormalization(name="features")(h)
outputs = {
    "sum": layers.Dense(1, name="sum")(features),
    "largest": layers.Dense(3, activation="softmax", name="largest")(features),
}
model = keras.Model(inputs, outputs)
model.compile(optimizer="adam", loss={"sum": "mse", "largest": "sparse_categorical_crossentropy"})
model.fit(x, y, batch_size=50, epochs=3)

# An array; the last batch has 29 rows.
by_array = model.predict(x)
print("first rows:", by_array["sum"][:2].ravel(), by_array["largest"][:2].argmax(axis=1))

# A dataset, with batches of one row at the end.
dataset = tf.data.Dataset.from_tensor_slices(x).batch(12)
by_dataset = model.predict(dataset, verbose=2)
np.testing.assert_allclose(by_dataset["sum"], by_array["sum"], atol=1e-5)

# Fewer rows than there may be processes, and single calls.
one = model.predict(x[:1], verbose=0)
direct = model(x[:1], training=False)
np.testing.assert_allclose(one["sum"], direct["sum"], atol=1e-5)
print("one row:", one["largest"][0])

# Some steps of an endless dataset.
endless = dataset.repeat()
some = model.predict(endless, steps=20, verbose=0)
print("rows in 20 steps:", len(some["sum"]))

# Features of a layer within, from a model that was never compiled.
extractor = keras.Model(model.inputs, model.get_layer("features").output)
found = extractor.predict(x, batch_size=100, verbose=0)
print("features:", found.shape, float(np.abs(found).sum()))
np.savez("predictions.npz", features=found, some=some["sum"], **by_array)
model.save_weights("points.weights.h5")
