"""`tfscale.distribute`: batches that two runs of one process would not share, and other ones."""

import itertools
import time
import zlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64, require_error
from tests.parallel.cases_distribute import SEED, distributed
from tfscale.testing import require_close, require_identical

PARALLEL = tf.data.AUTOTUNE
PICTURES = np.random.default_rng(0).uniform(size=(96, 6, 6, 3))
ROWS = np.random.default_rng(1).normal(size=(64, 5))


def source():
    return tf.data.Dataset.from_tensor_slices((PICTURES, PICTURES.mean((1, 2, 3)))).shuffle(96)


def distorted(picture, target):
    picture = tf.image.random_brightness(tf.image.random_flip_left_right(picture), 0.5)
    return picture, target + tf.random.normal([], dtype=target.dtype)


def parallel_map():
    return source().map(distorted, num_parallel_calls=PARALLEL).batch(10).prefetch(2)


def layers_in_map(parallel=None):
    flip, turn = layers.RandomFlip("horizontal"), layers.RandomFlip("vertical")
    data = source().map(lambda a, b: (turn(flip(a)), b), num_parallel_calls=parallel)
    return data.batch(16).prefetch(PARALLEL)


def generator_in_map():
    numbers = tf.random.Generator.from_seed(4)
    data = source().map(lambda a, b: (a, b + numbers.normal([], dtype=b.dtype)), PARALLEL)
    return data.batch(16).prefetch(2)


def parallel_interleave():
    files = tf.data.Dataset.range(6)

    def pictures_of(_):
        return source().take(16).map(distorted)

    return files.interleave(pictures_of, cycle_length=3, num_parallel_calls=PARALLEL).batch(16)


def random_filter():
    kept = source().map(distorted, PARALLEL).filter(lambda a, b: tf.random.uniform([]) < 0.8)
    return kept.batch(16).prefetch(PARALLEL)


def variable_in_map():
    count = tf.Variable(0.0, dtype=tf.float64)
    return source().map(lambda a, b: (a, b + count.assign_add(0.01))).batch(16).prefetch(PARALLEL)


def no_order():
    data = source().map(lambda a, b: (a * 2, b), num_parallel_calls=4, deterministic=False)
    return data.batch(16)


def no_order_by_options():
    options = tf.data.Options()
    options.deterministic = False
    return (
        source().map(lambda a, b: (a * 2, b), num_parallel_calls=4).batch(16).with_options(options)
    )


def nested():
    def pairs(a, b):
        return tf.data.Dataset.from_tensors((a, b)).repeat(2).map(distorted, PARALLEL)

    return source().flat_map(pairs).batch(16).prefetch(2)


def one_after_another():
    """Without parallel calls: right in one process, too."""
    return source().map(distorted).batch(16).prefetch(2)


PIPELINES = (
    parallel_map,
    layers_in_map,
    lambda: layers_in_map(PARALLEL),
    generator_in_map,
    parallel_interleave,
    random_filter,
    variable_in_map,
    no_order,
    no_order_by_options,
    nested,
    one_after_another,
)


def dense(n_inputs=5, **compiled):
    model = keras.Sequential([keras.Input((n_inputs,)), layers.Dense(3), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", **compiled)
    return model


def looked_at(build):
    """Return a dataset after a look at its first batch, while others are prefetched."""
    keras.utils.set_random_seed(SEED)
    data = build()
    for _ in itertools.islice(data, 1):
        time.sleep(0.02)
    return data


def two_passes(build):
    data = looked_at(build)
    batches = [batch for _ in range(2) for batch in data.as_numpy_iterator()]
    return [array for batch in batches for array in batch]


def trained():
    data = looked_at(parallel_map)
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(data, epochs=2, verbose=0)
    return [v.numpy() for v in model.variables] + [np.array(history.history["loss"])]


@sizes(2, 3, timeout_s=240)
def case_pipelines_that_depend_on_time_give_one_order():
    """The one that a process has under TensorFlow's determinism."""
    from tensorflow.python.framework import config

    with float64():
        tf.config.experimental.enable_op_determinism()
        try:
            expected, weights = [two_passes(build) for build in PIPELINES], trained()
        finally:
            config.disable_op_determinism()
        with distributed():
            for build, own in zip(PIPELINES, expected, strict=True):
                found = two_passes(build)
                require_identical(found, own)
                digest = zlib.crc32(b"".join(array.tobytes() for array in found))
                assert len(set(tfscale.allgather_object(digest))) == 1, build
            require_close(trained(), weights)


def other_from(batch, change=lambda x, y: (x + 1, y), n_batches=6, size=8):
    """Return batches of which rank 1 changes one, and all later ones are equal again."""
    is_other = tfscale.rank() == 1

    def batches():
        for i in range(n_batches):
            x, y = ROWS[i * size :][:size], ROWS[i * size :][:size, 0]
            yield change(x.copy(), y.copy()) if is_other and i == batch else (x, y)

    types = (tf.TensorSpec((None, 5), tf.float64), tf.TensorSpec((None,), tf.float64))
    return tf.data.Dataset.from_generator(batches, output_signature=types)


def swapped(x, y):
    return x[::-1], y


def one_bit(x, y):
    x.view(np.uint8)[3, 8] ^= 1
    return x, y


def moved_between_rows(x, y):
    x[0, 0], x[1, 1] = x[1, 1].copy(), x[0, 0].copy()
    return x, y


@sizes(2, 3, timeout_s=240)
def case_later_batches_are_compared():
    with distributed(), float64():
        for change, name in (
            (lambda x, y: (x + 1, y), "x"),
            (lambda x, y: (x, y + 1), "y"),
            (swapped, "x"),
            (one_bit, "x"),
            (moved_between_rows, "x"),
        ):
            data = other_from(3, change)
            require_error(
                lambda data=data: dense().fit(data, verbose=0),
                f"ExchangeError: {name} in batch 4 of epoch 1 of fit must be the same",
                "other values on rank 1 than on rank 0. Let the generator",
            )
        data = other_from(4)
        require_error(
            lambda: dense(steps_per_execution=3).fit(data.repeat(), steps_per_epoch=6, verbose=0),
            "x in batch 5 of epoch 1 of fit",
        )
        require_error(
            lambda: dense(run_eagerly=True).fit(data, verbose=0), "x in batch 5 of epoch 1 of fit"
        )
        options = {"epochs": 2, "steps_per_epoch": 3, "verbose": 0}
        require_error(
            lambda: dense().fit(data.repeat(), **options), "x in batch 2 of epoch 2 of fit"
        )
        uneven = other_from(3, size=5)
        require_error(lambda: dense().fit(uneven, verbose=0), "x in batch 4 of epoch 1 of fit")
        model = dense()
        before = [v.numpy() for v in model.variables]
        require_error(
            lambda: [model.train_on_batch(*batch) for batch in other_from(3)],
            "x in batch 4 of train_on_batch",
        )
        assert any((v.numpy() != old).any() for v, old in zip(model.variables, before, strict=True))
        require_identical(
            model.variables, tfscale.broadcast_object([*map(np.array, model.variables)])
        )


@sizes(2, timeout_s=240)
def case_later_batches_are_compared_under_other_exchanges():
    for exchange, text in (
        ("sharded", "x in batch 4 of epoch 1 of fit"),
        (tfscale.Chunked(), "x in batch 4 of epoch 1 of fit"),
        (tfscale.LocalSGD(groups=2, interval=2), "x in a batch of fit"),
    ):
        with distributed(exchange=exchange), float64():
            require_error(lambda: dense().fit(other_from(3), verbose=0), text)


@sizes(2, 3, timeout_s=240)
def case_batches_of_evaluate_and_predict_are_compared():
    with distributed(), float64():
        model = dense()
        require_error(lambda: model.evaluate(other_from(1), verbose=0), "x in batch 2 of evaluate")
        require_error(lambda: model.evaluate(other_from(4), verbose=0), "x in a batch of evaluate")
        require_error(lambda: model.predict(other_from(4), verbose=0), "x in a batch of predict")
        require_error(
            lambda: model.fit(ROWS, ROWS[:, 0], validation_data=other_from(4), verbose=0),
            "x in a batch of evaluate",
        )


class Noisy(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return ROWS[:8] + np.random.default_rng().normal(), ROWS[:8, 0]


@sizes(2, timeout_s=240)
def case_the_error_names_what_draws():
    def noisy(x, y):
        return x + np.random.default_rng().normal(), y

    rows = tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, 0]))

    def in_python(x, y):
        x = tf.numpy_function(lambda a: a + np.random.default_rng().normal(), [x], tf.float64)
        return tf.ensure_shape(x, [5]), y

    unseeded = tf.random.Generator.from_non_deterministic_state()

    def by_generator(x, y):
        return x + unseeded.normal([], dtype=x.dtype), y

    with distributed(), float64():
        for data, *texts in (
            (
                rows.map(in_python, num_parallel_calls=2).batch(8),
                "map (in_python) calls Python in parallel",
            ),
            (
                rows.map(by_generator).batch(8),
                "map (by_generator) draws random numbers: RngReadAndSkip",
                "tf.random.stateless_*",
            ),
            (Noisy(workers=2), "Noisy has 2 workers"),
            (Noisy(), "Noisy.__getitem__"),
            (((noisy(ROWS[:8], ROWS[:8, 0])) for _ in range(8)), "the generator"),
        ):
            options = {} if hasattr(data, "__len__") else {"steps_per_epoch": 8}
            require_error(
                lambda data=data, options=options: dense().fit(data, verbose=0, **options),
                "x in batch 1 of epoch 1 of fit must be the same on all ranks",
                *texts,
            )


class Rectified(layers.Layer):
    """Computes in place, where nothing else uses its input."""

    def call(self, inputs):
        return tf.nn.relu(-inputs)


@sizes(2, 3)
def case_a_batch_in_a_cache_stays_as_it_was():
    """Verification reads the first batch, and gives it to the step: a cache has the same memory."""
    rows = np.random.default_rng(2).normal(size=(24, 512)).astype("float32")

    def losses(is_mapped):
        keras.utils.set_random_seed(SEED)
        model = keras.Sequential([keras.Input((512,)), Rectified(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse")
        data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1]))
        data = data.map(lambda x, y: (x + 1, y)) if is_mapped else data
        return model.fit(data.batch(8).cache(), epochs=2, verbose=0).history["loss"]

    for is_mapped in (False, True):  # mapped rows are those of this rank
        expected = losses(is_mapped)
        with distributed():
            np.testing.assert_allclose(losses(is_mapped), expected, rtol=1e-5)
