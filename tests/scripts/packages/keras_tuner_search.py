"""A search by Keras Tuner, whose trials are trained one after another by all ranks."""

import keras
import keras_tuner
import numpy as np

inputs = np.random.normal(size=(53, 6))
targets = inputs @ np.random.normal(size=(6, 2))


def build(choices):
    units = choices.Int("units", 4, 16, step=4)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(2)])
    rate = choices.Float("rate", 1e-3, 1e-1, sampling="log")
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


tuner = keras_tuner.RandomSearch(build, "val_loss", max_trials=3, seed=1, directory="trials")
tuner.search(inputs, targets, batch_size=8, epochs=2, validation_split=0.2, verbose=0)
for trial in tuner.oracle.get_best_trials(3):
    print("trial:", trial.hyperparameters.values, trial.score)
print("best:", tuner.get_best_models()[0].evaluate(inputs, targets, verbose=0))
