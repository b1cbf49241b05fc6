"""A small model and data for AdaptiveBatchSize."""

import keras
import numpy as np

from tfscale.callbacks import AdaptiveBatchSize
from tfscale.data import GlobalBatches

SAMPLES = 48


def arrays(samples=SAMPLES):
    rng = np.random.default_rng(1)
    return rng.normal(size=(samples, 4)).astype("float32"), rng.normal(size=(samples, 1))


def make_data(batch_size=6, seed=3, **options):
    return GlobalBatches(*arrays(), batch_size=batch_size, seed=seed, **options)


def make_model(optimizer=None, dropout=0.0):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dropout(dropout), layers.Dense(1)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.125, momentum=0.5), "mse")
    return model


def adaptive(data, maximum=24, **options):
    return AdaptiveBatchSize(data, maximum, **{"log_path": None, "interval": 2, **options})
