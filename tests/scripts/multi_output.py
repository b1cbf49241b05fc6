"""Support tickets: a functional model with three inputs and two outputs."""

import keras
import numpy as np
from keras import layers

NUM_WORDS = 50
NUM_TAGS = 6
NUM_DEPARTMENTS = 3

rng = np.random.default_rng(0)
count = 215
titles = rng.integers(1, NUM_WORDS, size=(count, 5))
bodies = rng.integers(1, NUM_WORDS, size=(count, 12))
tags = rng.integers(0, 2, size=(count, NUM_TAGS)).astype("float32")
priorities = ((titles.mean(axis=1) + 5 * tags[:, 0]) > 27).astype("float32")[:, None]
departments = keras.utils.to_categorical(bodies[:, 0] % NUM_DEPARTMENTS, NUM_DEPARTMENTS)

title = keras.Input(shape=(None,), name="title")
body = keras.Input(shape=(None,), name="body")
tag = keras.Input(shape=(NUM_TAGS,), name="tags")

shared_embedding = layers.Embedding(NUM_WORDS, 12)
title_features = layers.GRU(8)(shared_embedding(title))
body_features = layers.Conv1D(8, 3, activation="relu")(shared_embedding(body))
body_features = layers.GlobalMaxPooling1D()(body_features)
x = layers.concatenate([title_features, body_features, tag])
x = layers.BatchNormalization()(x)
x = layers.Dense(16, activation="tanh", kernel_regularizer="l2")(x)
priority = layers.Dense(1, name="priority")(x)
department = layers.Dense(NUM_DEPARTMENTS, activation="softmax", name="department")(x)

model = keras.Model(
    inputs={"title": title, "body": body, "tags": tag},
    outputs={"priority": priority, "department": department},
)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-2),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.CategoricalCrossentropy(label_smoothing=0.05),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"priority": ["mae"], "department": ["accuracy", keras.metrics.F1Score("macro")]},
)
history = model.fit(
    {"title": titles, "body": bodies, "tags": tags},
    {"priority": priorities, "department": departments},
    epochs=3,
    batch_size=32,
    validation_split=0.2,
    verbose=2,
)
for name in sorted(history.history):
    print(name, [f"{value:.6f}" for value in history.history[name]])

results = model.evaluate(
    {"title": titles, "body": bodies, "tags": tags},
    {"priority": priorities, "department": departments},
    return_dict=True,
    verbose=0,
)
print({name: round(float(value), 5) for name, value in sorted(results.items())})
predictions = model.predict({"title": titles, "body": bodies, "tags": tags}, verbose=0)
print("first ticket:", predictions["priority"][0], predictions["department"][0])
np.savez("tickets.npz", **predictions)
model.save("tickets.keras")
