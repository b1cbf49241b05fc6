"""Tag every word of padded sentences with a bidirectional LSTM; padding is masked."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(42)

VOCABULARY = 40
TAGS = 4


def make_sentence():
    """Tags depend on a word and the one before it."""
    words = np.random.randint(1, VOCABULARY, size=np.random.randint(2, 15))
    before = np.concatenate([[0], words[:-1]])
    return words, (words // 10 + before % 2) % TAGS


sentences = [make_sentence() for _ in range(245)]
x = keras.utils.pad_sequences([words for words, _ in sentences], padding="post")
y = keras.utils.pad_sequences([tags for _, tags in sentences], padding="post", value=0)
lengths = np.array([len(words) for words, _ in sentences])
print("sentences:", x.shape, "mean length:", lengths.mean())

inputs = keras.Input(shape=(None,), dtype="int32")
h = layers.Embedding(VOCABULARY, 12, mask_zero=True)(inputs)
h = layers.Bidirectional(layers.LSTM(10, return_sequences=True))(h)
h = layers.BatchNormalization()(h)
outputs = layers.Dense(TAGS, activation="softmax")(h)
model = keras.Model(inputs, outputs)

# The loss leaves out padded words: their mask comes with the predictions.
model.compile(
    optimizer=keras.optimizers.Nadam(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(),
    weighted_metrics=["accuracy"],
)
model.fit(x, y, batch_size=24, epochs=3, validation_split=0.2, verbose=2)

probabilities = model.predict(x[:5], verbose=0)
for words, length, values in zip(x[:5], lengths, probabilities, strict=False):
    print(words[:length].tolist(), "->", values[:length].argmax(-1).tolist())
model.save_weights("tagger.weights.h5")
