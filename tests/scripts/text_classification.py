"""Text classification from raw strings with TextVectorization and masked embeddings."""

import random

import keras
import numpy as np
import tensorflow as tf
from keras import layers

NOUNS = ["film", "plot", "actor", "scene", "music", "story", "camera", "ending", "dialogue", "pace"]
GOOD = ["brilliant", "warm", "clever", "moving", "splendid", "funny"]
BAD = ["dull", "clumsy", "boring", "awful", "tired", "noisy"]


def write_review():
    label = random.randrange(2)
    sentences = []
    for _ in range(random.randint(1, 5)):
        words = GOOD if (random.random() < 0.85) == bool(label) else BAD
        sentences.append(f"The {random.choice(NOUNS)} was {random.choice(words)}!")
    return " ".join(sentences), label


reviews = [write_review() for _ in range(290)]
texts = np.array([text for text, _ in reviews])
labels = np.array([label for _, label in reviews])

train = tf.data.Dataset.from_tensor_slices((texts[:210], labels[:210])).shuffle(210).batch(32)
val = tf.data.Dataset.from_tensor_slices((texts[210:250], labels[210:250])).batch(32)
x_test, y_test = texts[250:], labels[250:]

vectorize = layers.TextVectorization(max_tokens=60, output_sequence_length=20)
vectorize.adapt(train.map(lambda text, label: text))
print("vocabulary:", [str(word) for word in vectorize.get_vocabulary()[2:8]])


def prepare(text, label):
    return vectorize(text), label


model = keras.Sequential(
    [
        keras.Input(shape=(None,), dtype="int64"),
        layers.Embedding(vectorize.vocabulary_size(), 16, mask_zero=True),
        layers.GlobalAveragePooling1D(),
        layers.Dense(16),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    loss="binary_crossentropy",
    optimizer=keras.optimizers.Adam(0.01),
    metrics=["accuracy", keras.metrics.AUC(name="auc")],
)
model.fit(
    train.map(prepare).prefetch(tf.data.AUTOTUNE),
    validation_data=val.map(prepare),
    epochs=4,
    verbose=2,
)

# A model that takes strings, for those who use it later.
inputs = keras.Input(shape=(), dtype="string")
end_to_end = keras.Model(inputs, model(vectorize(inputs)))
end_to_end.compile(loss="binary_crossentropy", metrics=["accuracy"])
end_to_end.evaluate(tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(16), verbose=2)
predictions = end_to_end.predict(tf.constant(x_test), verbose=0)
print(x_test[0][:30], predictions[0])
np.savetxt("predictions.csv", predictions, fmt="%.8f")
model.save("reviews.keras")
