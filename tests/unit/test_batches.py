"""Digests of batches, and what is said about the data of batches that differ."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfscale.fit.batches import cause_of, digest_of

PARALLEL = tf.data.AUTOTUNE
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "string"),
)
SHAPES = ((), (5,), (0, 3), (4, 1), (3, 4), (2, 4, 4, 3), (2, 3, 3, 1))


def values(dtype, shape):
    numbers = np.arange(1, 1 + int(np.prod(shape))).reshape(shape) % 100
    if dtype == "string":
        return tf.strings.as_string(numbers)
    return tf.cast(numbers % 2 if dtype == "bool" else numbers, dtype)


def digest(leaf):
    return int(digest_of(leaf))


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_differ_where_one_value_differs_or_two_are_exchanged(dtype):
    for shape in SHAPES:
        leaf = values(dtype, shape)
        own = digest(leaf)
        flat = np.ravel(np.array(leaf.numpy(), object if dtype == "string" else None))
        if flat.size == 0:
            continue
        seen = {own}
        for place in {0, flat.size // 2, flat.size - 1}:
            other = flat.copy()
            other[place] = b"x" if dtype == "string" else not flat[place] if dtype == "bool" else 0
            seen.add(digest(tf.constant(other.reshape(shape), leaf.dtype)))
        assert len(seen) == 1 + len({0, flat.size // 2, flat.size - 1}), (dtype, shape)
        array = flat.reshape(shape)
        for other in (array[::-1], np.roll(array, 1, -1)) if shape else ():
            is_same = np.array_equal(other, array)
            assert is_same or digest(tf.constant(other, leaf.dtype)) != own


def test_digests_do_not_need_static_shapes():
    for dtype in ("float32", "uint8"):
        spec = tf.TensorSpec((None, None, 2), dtype)
        traced = tf.function(digest_of, input_signature=[spec])
        rows = values(dtype, (3, 4, 2))
        assert int(traced(rows)) == digest(rows)
        assert int(traced(rows)) != int(traced(rows + 1))


def test_values_that_look_equal_differ():
    for one, other in ((0.0, -0.0), (1.0, 1.0 + 2**-23)):
        assert digest(tf.constant([one])) != digest(tf.constant([other]))
    # Sums of bits would be the same: each sign adds 2^31.
    numbers = tf.constant(np.random.default_rng(0).normal(size=(4, 6)), tf.float32)
    for other in (-numbers, 2 * numbers):
        assert digest(other) != digest(numbers)


class Images(keras.utils.PyDataset):
    pass


def jitter(x):
    return x + tf.random.normal([])


def in_python(x):
    return tf.numpy_function(lambda a: a, [x], tf.float32)


def test_the_cause_names_the_step_that_draws():
    rows = tf.data.Dataset.from_tensor_slices(np.zeros((8, 2), "float32"))
    numbers = tf.random.Generator.from_seed(1)
    flip = keras.layers.RandomFlip(seed=1)
    pictures = tf.data.Dataset.from_tensor_slices(np.zeros((8, 2, 2, 1), "float32"))
    signature = tf.TensorSpec((2,), tf.float32)
    for data, *texts in (
        (rows.map(jitter, PARALLEL).batch(2), "map (jitter) draws", "RandomStandardNormal"),
        (rows.batch(2).map(jitter).prefetch(1), "map (jitter) draws", "stateless"),
        (rows.map(lambda x: x + numbers.normal([])), "RngReadAndSkip"),
        (pictures.map(lambda x: flip(x)), "AssignVariableOp"),
        (pictures.map(flip), "AssignVariableOp"),
        (rows.filter(lambda x: tf.random.uniform([]) < 0.5), "filter (lambda) draws"),
        (rows.interleave(lambda x: rows.map(jitter), num_parallel_calls=2), "RandomStandardNormal"),
        (rows.flat_map(lambda x: rows.map(jitter, PARALLEL)), "RandomStandardNormal"),
        (rows.map(in_python, PARALLEL), "map (in_python) calls Python in parallel"),
        (rows.map(in_python), "map (in_python) calls Python:"),
        (tf.data.Dataset.from_generator(lambda: iter(()), output_signature=signature), "generator"),
        (rows.shuffle(8).map(lambda x: x * 2, PARALLEL), "Shuffle by a fixed seed"),
        (Images(workers=3), "Images has 3 workers"),
        (Images(), "Images.__getitem__"),
        (iter([]), "the generator"),
        (np.zeros(3), "Shuffle by a fixed seed"),
    ):
        found = cause_of(data)
        assert all(text in found for text in texts), (texts, found)
