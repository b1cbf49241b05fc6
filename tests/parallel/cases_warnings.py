"""What ranks are warned of: training apart unawares, on the same samples, from other weights."""

from __future__ import annotations

import logging
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.spawn import sizes
from tests.parallel.cases_agreement import BATCH, SGD, N, batches, train
from tfscale import DistributedOptimizer
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    Callback,
    Checkpoint,
    MetricAverageCallback,
    ParameterAveraging,
)


class Heard(logging.Handler):
    """Keeps warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def warnings_of(action):
    """Return all that is warned of on rank 0."""
    heard = Heard()
    logging.getLogger("tfscale").addHandler(heard)
    try:
        action()
    finally:
        logging.getLogger("tfscale").removeHandler(heard)
    return " ".join(tfscale.broadcast_object(heard.texts, 0))


class OwnStep(keras.Model):
    """Exchanges gradients itself, or not."""

    def __init__(self, exchanges):
        super().__init__()
        self.dense, self.exchanges = keras.layers.Dense(1), exchanges

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        tape = tf.GradientTape()
        with tfscale.DistributedGradientTape(tape) if self.exchanges else tape as recorded:
            loss = tf.reduce_mean((self(x) - tf.cast(y, tf.float32)) ** 2)
        gradients = recorded.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def fit_own_step(exchanges):
    model = OwnStep(exchanges)
    model.compile(SGD(0.1))
    x = np.random.default_rng(tfscale.rank()).normal(size=(N, 2))
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[Callback()])


@sizes(2, timeout_s=120)
def case_ranks_that_train_apart_are_told():
    told = "The ranks of this job train the model"
    assert told in warnings_of(lambda: train(SGD(0.1)))
    averaging = {"callbacks": [ParameterAveraging()]}
    assert told not in warnings_of(lambda: train(SGD(0.1), **averaging))
    assert told not in warnings_of(train)
    assert told not in warnings_of(lambda: fit_own_step(True))

    def without_callbacks():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(SGD(0.1), "mse")
        model.fit(batches(1)["data"], verbose=0)

    assert told in warnings_of(without_callbacks)


@sizes(2)
def case_an_own_step_that_exchanges_nothing_is_told():
    with mock.patch("tfscale.comm.eager._has_exchanged_gradients", False):
        text = warnings_of(lambda: fit_own_step(False))
    assert "no tfscale.DistributedGradientTape is used" in text


@sizes(2)
def case_equal_samples_are_told():
    def fit(seed):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(SGD(0.1)), "mse")
        x = np.random.default_rng(seed).normal(size=(N, 2))
        model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[Callback()])

    assert "Ranks 0, 1 were given the same samples." in warnings_of(lambda: fit(0))
    assert "same samples" not in warnings_of(lambda: fit(tfscale.rank()))


@sizes(2, 3)
def case_unequal_first_weights_are_told():
    def fit(seed, *callbacks, broadcast=False):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(SGD(0.1)), "mse")
        if broadcast:
            tfscale.broadcast_variables(model.weights)
        model.fit(verbose=0, callbacks=[Callback(), *callbacks], x=batches(1)["data"])
        return lambda: model.fit(batches(1)["data"], verbose=0, callbacks=[Callback()])

    told = "Rank 1 begins with other weights than rank 0, and no callback makes them equal"
    own = 1 + tfscale.rank()
    assert told in warnings_of(lambda: fit(own))
    assert "other weights" not in warnings_of(lambda: fit(1))
    assert "other weights" not in warnings_of(lambda: fit(own, broadcast=True))
    start = BroadcastGlobalVariablesCallback(0)
    assert "other weights" not in warnings_of(lambda: fit(own, start))
    assert "other weights" not in warnings_of(fit(own, start))  # a second fit

    def one_rank_has_trained():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(SGD(0.1)), "mse")
        if tfscale.rank() == 0:
            model.optimizer.iterations.assign(3)
        model.fit(batches(1)["data"], verbose=0, callbacks=[Callback()])

    assert told in warnings_of(one_rank_has_trained)


@sizes(2)
def case_who_restores_looks_at_first_weights():
    """Where there is nothing to restore yet: else all ranks get what was saved."""

    def fit(callback, is_built=True, epochs=1):
        keras.utils.set_random_seed(1 + tfscale.rank())
        first = [keras.Input((2,))] if is_built else []
        model = keras.Sequential([*first, keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(SGD(0.1)), "mse")
        callbacks = [callback, MetricAverageCallback()]
        model.fit(batches(1)["data"], epochs=epochs, verbose=0, callbacks=callbacks)

    for make in (
        lambda folder: Checkpoint(folder, asynchronous=False),
        lambda folder: BackupAndRestore(folder, delete_checkpoint=False),
    ):
        folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
        told = warnings_of(lambda make=make, folder=folder: fit(make(folder)))
        assert told.count("Rank 1 begins with other weights") == 1
        tfscale.barrier()
        again = warnings_of(lambda make=make, folder=folder: fit(make(folder), epochs=2))
        assert "other weights" not in again
    told = "Models that are built in the first step begin with weights of their own"
    assert told in warnings_of(lambda: fit(Callback(), is_built=False))
