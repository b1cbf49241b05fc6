"""`tfscale.distribute`: the maps of a dataset run on each rank's rows; results are the same."""

import contextlib
import logging
import tempfile
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.src.utils import image_dataset_utils

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64, require_error, shared_folder
from tests.parallel.cases_distribute import distributed
from tfscale.callbacks import BatchSizeSchedule
from tfscale.testing import require_close, require_identical

N_ROWS = 29
ROWS = np.random.default_rng(1).normal(size=(N_ROWS, 5))
TARGETS = ROWS[:, :1] + 1
PARALLEL = tf.data.AUTOTUNE


class Counted:
    """Counts what it maps: a promise that a Python function has no state lets it run on rows."""

    def __init__(self):
        self.n_calls = 0

    def once(self, part):
        def count(array):
            self.n_calls += 1
            return array

        counted = tf.numpy_function(count, [part], part.dtype, stateful=False)
        return tf.ensure_shape(counted, part.shape)

    def __call__(self, row, target):
        return 2 * self.once(row), target


def source():
    return tf.data.Dataset.from_tensor_slices((ROWS, TARGETS))


def shuffled_before(decode):
    return source().shuffle(N_ROWS).map(decode, PARALLEL).batch(8).prefetch(2)


def shuffled_after(decode):
    return source().map(decode, PARALLEL).shuffle(N_ROWS).batch(8).prefetch(2)


def zipped(decode):
    rows = tf.data.Dataset.from_tensor_slices(ROWS).map(lambda row: decode(row, 0)[0], PARALLEL)
    targets = tf.data.Dataset.from_tensor_slices(TARGETS).map(tf.abs)
    return tf.data.Dataset.zip((rows, targets)).shuffle(11).batch(8)


def full_batches(decode):
    data = source().map(decode).repeat(2).shuffle(10).take(50).skip(3).batch(7, drop_remainder=True)
    return data.repeat(2).take(9).prefetch(PARALLEL)


def few_rows(decode):
    """Batches of 2 and 1 rows: of 3 ranks one has none."""
    return source().map(decode, PARALLEL).batch(2)


def unknown_length(decode):
    kept = source().filter(lambda row, target: row[0] > -0.5)
    return kept.map(decode, PARALLEL).batch(8, num_parallel_calls=2).prefetch(1)


PIPELINES = (shuffled_before, shuffled_after, zipped, full_batches, few_rows, unknown_length)


def small_model(*first, **options):
    model = keras.Sequential([keras.Input((5,)), *first, layers.Dense(3), layers.Dropout(0.2)])
    model.add(layers.BatchNormalization())
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def results(model, history):
    return [v.numpy() for v in model.variables] + [np.array(v) for v in history.history.values()]


def both_ways(train, **options):
    """Train on whole batches and on rows; return the results on rows, and what each way mapped."""
    found, n_calls = [], []
    for decode in ("batches", "rows"):
        counted = Counted()
        with distributed(decode=decode, **options):
            found.append(train(counted))
        n_calls.append(counted.n_calls)
    require_close(found[1], found[0], atol=1e-8)
    for of_rank in tfscale.allgather_object(found[1]):
        require_identical(of_rank, found[1])
    return n_calls


def n_own_rows(n_rows, batch_size):
    """Return the rows of batches that this rank computes, one of a batch of which it has none."""
    n_ranks, rank = tfscale.size(), tfscale.rank()
    totals = [min(batch_size, n_rows - start) for start in range(0, n_rows, batch_size)]
    return sum(max(1, n // n_ranks + (rank < n % n_ranks)) for n in totals)


@sizes(2, 3, timeout_s=300)
def case_training_on_rows_equals_whole_batches():
    """Also where the script has read batches before, which moves the order of shuffles."""
    with float64():
        for build in PIPELINES:

            def train(decode, build=build):
                data, model = build(decode), small_model()
                for _ in data.take(1):
                    pass
                history = model.fit(data, epochs=2, validation_data=build(decode), verbose=0)
                return results(model, history) + [row for row, _ in data.as_numpy_iterator()]

            n_whole, n_rows = both_ways(train, verify="off")
            assert n_rows < 0.9 * n_whole, (build, n_rows, n_whole)


@sizes(2, 3, timeout_s=240)
def case_each_rank_maps_its_rows():
    with float64():
        for build, size in ((shuffled_before, 8), (few_rows, 2)):

            def train(decode, build=build):
                model = small_model()
                return results(model, model.fit(build(decode), epochs=2, verbose=0))

            assert both_ways(train) == [2 * N_ROWS, 2 * n_own_rows(N_ROWS, size)]


@sizes(2, 3, timeout_s=300)
def case_evaluate_predict_and_other_loops():
    with float64():

        def evaluate_and_predict(decode):
            model, data = small_model(), zipped(decode)
            # No rank sends truth values: each computes those of all rows.
            signs = keras.Sequential([keras.Input((5,)), layers.Lambda(lambda rows: rows > 0)])
            return [
                np.array(model.evaluate(data, verbose=0)),
                model.predict(data, verbose=0),
                signs.predict(data, verbose=0).astype(int),
            ]

        n_own = 3 * n_own_rows(N_ROWS, 8)
        assert both_ways(evaluate_and_predict) == [3 * N_ROWS, n_own]

        def train(decode, build=shuffled_before, fit=None, **compiled):
            model = small_model(**compiled)
            return results(model, model.fit(build(decode), epochs=2, verbose=0, **(fit or {})))

        for options in (
            {"run_eagerly": True},
            {"steps_per_execution": 3},
            {"build": unknown_length, "steps_per_execution": 2},
            {
                "fit": {"steps_per_epoch": 3},
                "build": lambda decode: shuffled_before(decode).repeat(),
            },
        ):
            n_whole, n_rows = both_ways(lambda decode, options=options: train(decode, **options))
            assert n_rows < n_whole


@contextlib.contextmanager
def pictures(n=22, own=False):
    """Yield a folder of pictures in two classes, one for all ranks or one for each."""
    with tempfile.TemporaryDirectory() if own else shared_folder() as folder:
        if own or tfscale.rank() == 0:
            rng = np.random.default_rng(0)
            for i in range(n):
                path = Path(folder, "ab"[i % 3 > 0], f"{i}.jpg")
                path.parent.mkdir(exist_ok=True)
                picture = tf.constant(rng.integers(0, 255, (9, 7 + i % 3, 3)), tf.uint8)
                path.write_bytes(tf.io.encode_jpeg(picture).numpy())
        tfscale.barrier()
        yield folder
        tfscale.barrier()


def train_on_pictures(folder, decode, **options):
    """Train as a script does, with `decode` called for each picture that Keras loads."""
    load = image_dataset_utils._load_image_tf

    def counted(path, *args):
        return load(decode.once(path), *args)

    with mock.patch.object(image_dataset_utils, "_load_image_tf", counted):
        data, held_out = keras.utils.image_dataset_from_directory(
            folder,
            image_size=(6, 6),
            batch_size=5,
            validation_split=0.4,
            subset="both",
            seed=3,
            verbose=False,
            **options,
        )
    units = 2 if options.get("label_mode") == "categorical" else 1
    model = keras.Sequential([layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(units)])
    model.compile("adam", "mse")
    weights = {0: 0.5, 1: 2.0}
    history = model.fit(data, epochs=2, validation_data=held_out, class_weight=weights, verbose=0)
    return results(model, history)


@sizes(2, 3, timeout_s=240)
def case_pictures_of_a_folder():
    with float64(), pictures() as folder:
        for options in ({"label_mode": "categorical"}, {"label_mode": "int"}):
            n_whole, n_rows = both_ways(lambda d, o=options: train_on_pictures(folder, d, **o))
            assert n_whole == 2 * 22 and n_rows == 2 * (n_own_rows(14, 5) + n_own_rows(8, 5))


@contextlib.contextmanager
def log_lines():
    """Collect what tfscale logs, from level INFO on."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("tfscale")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield texts
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@sizes(2, timeout_s=240)
def case_one_line_says_that_ranks_prepare_their_rows():
    def train(decode):
        model, data = small_model(), shuffled_before(decode)
        return results(model, model.fit(data, epochs=2, validation_data=data, verbose=0))

    with float64(), log_lines() as texts:
        n_whole, n_rows = both_ways(train)
    assert n_rows < n_whole
    lines = [line for line in texts if "(--decode rows)" in line]
    assert lines == [
        "Each rank prepares only its own rows of a dataset, before its maps (--decode rows)."
    ] * (tfscale.rank() == 0)
    assert not [line for line in texts if "whole batches" in line]


@sizes(2, timeout_s=240)
def case_one_line_names_the_step_that_keeps_whole_batches():
    def train(decode, change):
        model = small_model()
        return results(model, model.fit(change(decode), epochs=2, verbose=0))

    def after_batch(decode):
        return shuffled_before(decode).map(lambda row, target: (row + 1, target))

    with float64():
        for change, text in (
            (lambda decode: source().map(decode).cache().batch(8), "cache follows map ("),
            (after_batch, "map (lambda) follows batch"),
        ):
            with log_lines() as texts:
                n_whole, n_rows = both_ways(lambda d, change=change: train(d, change))
            assert n_whole == n_rows
            lines = [line for line in texts if "prepares whole batches" in line]
            assert len(lines) == (tfscale.rank() == 0) and all(text in line for line in lines)


@sizes(2, timeout_s=240)
def case_names_that_differ_between_ranks_keep_whole_batches():
    with float64(), pictures(own=True) as folder, log_lines() as texts:
        n_whole, n_rows = both_ways(lambda decode: train_on_pictures(folder, decode))
        assert n_whole == n_rows
        assert any("differ between ranks" in text for text in texts) == (tfscale.rank() == 0)


@sizes(2, timeout_s=240)
def case_batches_that_change_their_size_are_whole():
    def train(decode):
        model, schedule = small_model(), BatchSizeSchedule({1: 12})
        fitted = model.fit(shuffled_before(decode), epochs=2, callbacks=[schedule], verbose=0)
        return results(model, fitted)

    with float64():
        n_whole, n_rows = both_ways(train)
        assert n_whole == n_rows


class Centred(layers.Layer):
    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, 0)


@sizes(2, 3, timeout_s=240)
def case_rows_are_verified_and_compared():
    rank = tfscale.rank()
    other = source().map(lambda row, target: (row + rank, target)).batch(8)
    later = tf.data.Dataset.from_tensor_slices(ROWS + (np.arange(N_ROWS) >= 24)[:, None] * rank)
    later = later.map(lambda row: (row, row[:1])).batch(8)
    words = [["a", "b"], ["b", "a"]][rank % 2]
    lookup = layers.StringLookup(vocabulary=words, num_oov_indices=0)
    texts = tf.data.Dataset.from_tensor_slices([["a"] * 5] * 9)
    texts = texts.map(lambda text: (lookup(text), lookup(text)[:1])).batch(3)
    with distributed(), float64():
        model = small_model(Centred())
        data = shuffled_before(Counted())
        require_error(lambda: model.fit(data, verbose=0), "differs from a step of one process")
        require_error(lambda: model.predict(data, verbose=0), "differs from a step of one process")
        require_error(
            lambda: small_model().fit(other, verbose=0), "x in batch 1 of epoch 1 of fit must be"
        )
        require_error(
            lambda: small_model().fit(later, verbose=0), "data in batch 4 of epoch 1 of fit must be"
        )
        require_error(
            lambda: small_model().fit(texts, verbose=0), "x in batch 1 of epoch 1 of fit must be"
        )
        require_error(lambda: small_model().evaluate(later, verbose=0), "data in a batch of eval")
