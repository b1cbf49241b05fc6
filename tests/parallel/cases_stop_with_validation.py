"""Stops during an epoch that is validated: what unites the ranks begins with the validation."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.spawn import sizes
from tests.parallel.cases_local_sgd import agree

N_BATCHES = 6


class StopsIn(keras.callbacks.Callback):
    """Stops the last rank in a batch of the second epoch."""

    def __init__(self, batch):
        super().__init__()
        self.batch, self.epoch, self.seen = batch, -1, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch, tfscale.rank()) == (1, self.batch, tfscale.size() - 1):
            self.model.stop_training = True

    def on_test_begin(self, logs=None):
        self.seen.append([v.numpy() for v in self.model.weights])


def data():
    random = np.random.default_rng(tfscale.rank())
    x = random.normal(size=(4 * N_BATCHES, 2)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)


@sizes(2, 3, timeout_s=200)
def case_one_rank_stops_amid_an_epoch():
    """In a batch before the last ones, in the one before the last, in the last one."""
    n = tfscale.size()
    exchanges = ("allreduce", tfscale.Sharded(), tfscale.LocalSGD(n, 4, "allreduce"))
    for exchange in exchanges:
        for batch in (1, N_BATCHES - 2, N_BATCHES - 1):
            for given in (data(), data().filter(lambda x, y: True)):
                keras.utils.set_random_seed(3)
                layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
                model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
                optimizer = tfscale.DistributedOptimizer(
                    keras.optimizers.SGD(0.1), exchange=exchange
                )
                model.compile(optimizer, "mse")
                stops = StopsIn(batch)
                start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
                model.fit(
                    given,
                    validation_data=data(),
                    epochs=4,
                    verbose=0,
                    callbacks=[start, hvd.callbacks.MetricAverageCallback(), stops],
                )
                # Ranks that begin a third epoch give it up, alone with themselves.
                assert stops.epoch <= 2, (exchange, batch, stops.epoch)
                assert all(agree(w) for seen in stops.seen[:2] for w in seen), (exchange, batch)
                assert all(agree(v.numpy()) for v in model.weights), (exchange, batch)
