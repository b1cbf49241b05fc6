"""Recommend films: embeddings of users and films, and the dot product of both."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(2)
USERS, FILMS, SIZE = 40, 60, 6


class Recommender(keras.Model):
    def __init__(self, n_users, n_films, size, **kwargs):
        super().__init__(**kwargs)
        decay = keras.regularizers.L2(1e-5)
        self.users = layers.Embedding(n_users, size, embeddings_regularizer=decay)
        self.user_bias = layers.Embedding(n_users, 1)
        self.films = layers.Embedding(n_films, size, embeddings_regularizer=decay)
        self.film_bias = layers.Embedding(n_films, 1)
        self.normalize = layers.BatchNormalization()

    def call(self, inputs):
        user, film = inputs[:, 0], inputs[:, 1]
        users = self.normalize(self.users(user))
        dot = ops.sum(users * self.films(film), axis=1, keepdims=True)
        return ops.sigmoid(dot + self.user_bias(user) + self.film_bias(film))


tastes, kinds = np.random.normal(size=(USERS, 2)), np.random.normal(size=(FILMS, 2))
pairs = np.stack([np.random.randint(USERS, size=600), np.random.randint(FILMS, size=600)], axis=1)
ratings = 1 / (1 + np.exp(-np.sum(tastes[pairs[:, 0]] * kinds[pairs[:, 1]], axis=1)))

model = Recommender(USERS, FILMS, SIZE)
model.compile(
    loss=keras.losses.BinaryCrossentropy(),
    optimizer=keras.optimizers.Adagrad(0.1, use_ema=True, ema_momentum=0.9),
    metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
)
model.fit(pairs, ratings, batch_size=64, epochs=4, validation_split=0.1, verbose=2)

user = 7
unseen = np.setdiff1d(np.arange(FILMS), pairs[pairs[:, 0] == user, 1])
candidates = np.stack([np.full_like(unseen, user), unseen], axis=1)
scores = model.predict(candidates, verbose=0).flatten()
for place in scores.argsort()[-3:][::-1]:
    print(f"film {unseen[place]}: {scores[place]:.4f}")
model.save_weights("recommender.weights.h5")
