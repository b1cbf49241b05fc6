"""Sequence classification with a transformer block written as layers of one's own."""

import keras
import numpy as np
from keras import layers, ops

VOCABULARY = 30
LENGTH = 16


class TransformerBlock(layers.Layer):
    def __init__(self, width, heads, hidden, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width // heads)
        self.feed_forward = keras.Sequential(
            [layers.Dense(hidden, activation="gelu"), layers.Dense(width)]
        )
        self.norm_1 = layers.LayerNormalization(epsilon=1e-6)
        self.norm_2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout_1 = layers.Dropout(rate)
        self.dropout_2 = layers.Dropout(rate)

    def call(self, inputs):
        attended = self.dropout_1(self.attention(inputs, inputs))
        x = self.norm_1(inputs + attended)
        return self.norm_2(x + self.dropout_2(self.feed_forward(x)))


class TokenAndPosition(layers.Layer):
    def __init__(self, length, vocabulary, width, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(vocabulary, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.tokens(x) + self.positions(positions)


rng = np.random.default_rng(5)
x = rng.integers(0, VOCABULARY, size=(350, LENGTH))
y = (x[:, :8].sum(axis=1) > x[:, 8:].sum(axis=1)).astype("int32")
x_train, y_train, x_val, y_val = x[:270], y[:270], x[270:], y[270:]

inputs = keras.Input(shape=(LENGTH,))
h = TokenAndPosition(LENGTH, VOCABULARY, 16)(inputs)
h = TransformerBlock(16, 2, 32)(h)
h = layers.GlobalAveragePooling1D()(h)
h = layers.Dropout(0.1)(h)
outputs = layers.Dense(2, activation="softmax")(h)
model = keras.Model(inputs, outputs)

model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=0.01, weight_decay=1e-3),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(x_train, y_train, batch_size=32, epochs=5, validation_data=(x_val, y_val), verbose=2)
loss, accuracy = model.evaluate(x_val, y_val, verbose=0)
print(f"validation loss: {loss:.4f}, accuracy: {accuracy:.4f}")
model.save_weights("transformer.weights.h5")
