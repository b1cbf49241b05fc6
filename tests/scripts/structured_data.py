"""Structured data: strings, integers and numbers as a dictionary of features."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(5)
rng = np.random.default_rng(5)
n = 280
table = {
    "age": rng.integers(20, 80, n).astype("float32"),
    "pressure": rng.normal(130, 15, n).astype("float32"),
    "vessels": rng.integers(0, 4, n),
    "rhythm": rng.choice(["normal", "fixed", "reversible"], n),
}
score = 0.05 * (table["age"] - 50) + 0.8 * (table["rhythm"] == "fixed") + 0.4 * table["vessels"]
target = (score + rng.normal(scale=0.4, size=n) > 0.8).astype("int32")


def to_dataset(rows, shuffle=False):
    features = {name: column[rows] for name, column in table.items()}
    ds = tf.data.Dataset.from_tensor_slices((features, target[rows]))
    return (ds.shuffle(len(rows)) if shuffle else ds).batch(32)


rows = rng.permutation(n)
train_ds, val_ds = to_dataset(rows[:220], shuffle=True), to_dataset(rows[220:])


def encode_numeric(name):
    feature = keras.Input(shape=(1,), name=name)
    normalizer = layers.Normalization()
    normalizer.adapt(train_ds.map(lambda x, y: tf.expand_dims(x[name], -1)))
    return feature, normalizer(feature)


def encode_category(name, lookup_class, dtype):
    feature = keras.Input(shape=(1,), name=name, dtype=dtype)
    lookup = lookup_class(output_mode="int")
    lookup.adapt(train_ds.map(lambda x, y: tf.expand_dims(x[name], -1)))
    print(name, [str(word) for word in sorted(lookup.get_vocabulary(), key=str)])
    one_hot = layers.CategoryEncoding(lookup.vocabulary_size(), output_mode="one_hot")
    return feature, one_hot(lookup(feature))


pairs = [
    encode_numeric("age"),
    encode_numeric("pressure"),
    encode_category("vessels", layers.IntegerLookup, "int64"),
    encode_category("rhythm", layers.StringLookup, "string"),
]
x = layers.concatenate([encoded for _, encoded in pairs])
x = layers.Dense(16)(x)
x = layers.BatchNormalization()(x)
x = layers.Activation("relu")(x)
output = layers.Dense(1, activation="sigmoid")(x)
model = keras.Model([feature for feature, _ in pairs], output)
model.compile("adam", "binary_crossentropy", metrics=["accuracy", "auc"])
model.fit(train_ds, epochs=4, validation_data=val_ds, verbose=2)

sample = {"age": 61.0, "pressure": 145.0, "vessels": 1, "rhythm": "fixed"}
batch = {name: tf.convert_to_tensor([[value]]) for name, value in sample.items()}
prediction = model.predict(batch, verbose=0)
print(f"This patient is ill with {100 * prediction[0][0]:.4f} per cent probability")
print("evaluate:", model.evaluate(val_ds, verbose=0))
model.save("patients.keras")
