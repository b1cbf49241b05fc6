"""`tfscale.distribute`: the maps of a dataset run on each rank's rows, and results stay the same."""

import functools
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64
from tests.parallel.cases_distribute import SEED, distributed
from tfscale.testing import require_close, require_identical

N_ROWS = 29
ROWS = np.random.default_rng(1).normal(size=(N_ROWS, 5))
PARALLEL = tf.data.AUTOTUNE


class Counted:
    """A map that counts its calls: a promise that a Python function has no state lets it move."""

    def __init__(self):
        self.n_calls = 0

    def __call__(self, row, target):
        def double(array):
            self.n_calls += 1
            return array * 2

        doubled = tf.numpy_function(double, [row], row.dtype, stateful=False)
        return tf.ensure_shape(doubled, row.shape), target

    def since(self, n_before):
        return self.n_calls - n_before


def source():
    return tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :1]))


def shuffled_first(decode):
    return source().shuffle(N_ROWS).map(decode, PARALLEL).batch(8).prefetch(2)


def shuffled_last(decode):
    return source().map(decode, PARALLEL).shuffle(N_ROWS).batch(8).prefetch(2)


def zipped(decode):
    rows = tf.data.Dataset.from_tensor_slices(ROWS).map(lambda row: decode(row, 0)[0], PARALLEL)
    targets = tf.data.Dataset.from_tensor_slices(ROWS[:, :1]).map(tf.abs)
    return tf.data.Dataset.zip((rows, targets)).shuffle(11).batch(8)


def repeated(decode):
    data = source().map(decode).repeat(2).shuffle(10).take(50).skip(3).batch(7, drop_remainder=True)
    return data.repeat(2).take(9).prefetch(PARALLEL)


def few_rows(decode):
    """Batches of 2 and 1: a rank of 3 has none."""
    return source().map(decode, PARALLEL).batch(2)


def unknown_length(decode):
    kept = source().filter(lambda row, target: row[0] > -0.5)
    return kept.map(decode, PARALLEL).batch(8, num_parallel_calls=2).prefetch(1)


PIPELINES = (shuffled_first, shuffled_last, zipped, repeated, few_rows, unknown_length)


def small_model():
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.2)]
    )
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def train(build, decode, **options):
    """Train, evaluate and predict; an early look at the data moves the state of its shuffles."""
    keras.utils.set_random_seed(SEED)
    data, model = build(decode), small_model()
    for _ in data.take(1):
        pass
    history = model.fit(data, epochs=3, validation_data=build(decode), verbose=0, **options)
    results = [np.array(values) for values in history.history.values()]
    results += [np.array(model.evaluate(data, verbose=0)), model.predict(data, verbose=0)]
    results += [row for row, _ in data.unbatch().as_numpy_iterator()]
    model.fit(data, verbose=0)
    return [v.numpy() for v in model.variables] + results


def of_all_ranks(build, **options):
    """Return the results of whole batches, and of rows, and the rows that this rank mapped."""
    found = []
    for decode in ("batches", "rows"):
        counted = Counted()
        with distributed(decode=decode):
            found.append(train(build, counted, **options))
        found.append(counted.n_calls)
    return found


@sizes(2, 3, timeout_s=400)
def case_rows_train_as_whole_batches():
    with float64():
        for build in PIPELINES:
            expected, n_whole, results, n_rows = of_all_ranks(build)
            require_close(results, expected, atol=1e-8)
            for of_rank in tfscale.allgather_object(results):
                require_identical(of_rank, results)
            print(build.__name__, n_whole, n_rows, flush=True)
