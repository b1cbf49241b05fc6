"""A small model that ranks are told to train differently, and what is logged."""

import logging

import keras
import numpy as np

import tfscale
from tfscale import DistributedOptimizer
from tfscale.callbacks import Callback
from tfscale.data import GlobalBatches

BATCH, N = 4, 16
SGD = keras.optimizers.SGD


def train(optimizer=None, width=3, batch_size=BATCH, n=N, callbacks=(), data=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, name="first"), keras.layers.Dense(1, name="last")]
    # Given names: Keras's numbers differ between ranks where one has loaded a model before.
    model = keras.Sequential([keras.Input((2,)), *layers], name="model")
    optimizer = DistributedOptimizer(SGD(0.1)) if optimizer is None else optimizer
    model.compile(optimizer, "mse", **options)
    x = np.random.default_rng(tfscale.rank()).normal(size=(n, 2))
    fed = {"x": x, "y": x[:, :1], "batch_size": batch_size} if data is None else {"x": data}
    model.fit(**fed, epochs=2, verbose=0, callbacks=[Callback(), *callbacks])
    return model


def batches(seed):
    x = np.zeros((24, 2))
    return {"data": GlobalBatches(x, x[:, :1], batch_size=12, seed=seed)}


TOLD = "The first weights must be the same on all ranks. Received: other values on rank 1"


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def warnings_of_ranks(action):
    heard = Heard()
    logging.getLogger("tfscale").addHandler(heard)
    try:
        action()
    finally:
        logging.getLogger("tfscale").removeHandler(heard)
    return tfscale.allgather_object(" ".join(heard.texts))
