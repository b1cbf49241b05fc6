"""Maps of a dataset that run on chosen rows, and steps that keep them on whole batches."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tfscale.internals.row_maps import RowMaps, UnmovedError

PARALLEL = tf.data.AUTOTUNE
COUNT = tf.Variable(1.0)
UNORDERED = tf.data.Options()
UNORDERED.deterministic = False
TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [5.0, 6.0]), -1.0)
DOUBLE = tf.function(lambda x: x * 2)


def rows(n=10):
    return tf.data.Dataset.from_tensor_slices(np.arange(2.0 * n, dtype="float32").reshape(n, 2))


def decode(x):
    return x * 2 + 1


def pair(x):
    return x, tf.reduce_sum(x)


def checked(x):
    tf.debugging.assert_all_finite(x, "x")
    return x + TABLE.lookup(tf.cast(x[0] > 4, tf.int32)) if x[1] > 5 else DOUBLE(x)


def in_python(x):
    return tf.ensure_shape(tf.py_function(lambda a: a, [x], tf.float32), [2])


def draw(x):
    return x + tf.random.normal([])


def open_shape(x):
    return x[: tf.cast(x[0], tf.int32) % 2 + 1]


def nested(x):
    return tf.data.Dataset.from_tensors(x).map(decode)


def several(x):
    return tf.data.Dataset.from_tensors(x).repeat(2)


def generated():
    signature = tf.TensorSpec((2,), tf.float32)
    return tf.data.Dataset.from_generator(
        lambda: iter(np.ones((10, 2))), output_signature=signature
    )


def numbers(n):
    return tf.data.Dataset.from_tensor_slices(tf.as_string(tf.range(n)))


MOVED = {
    "map": lambda: rows().map(decode).batch(4),
    "parallel": lambda: rows().shuffle(10, seed=1).map(decode, PARALLEL).batch(4).prefetch(2),
    "pairs": lambda: rows().map(pair).map(lambda x, y: (x, y + 1), 2).batch(4),
    "dict": lambda: rows().map(lambda x: {"a": x, "b": decode(x)}).batch(4, drop_remainder=True),
    "between": lambda: (
        rows().map(decode).prefetch(1).take(9).skip(1).repeat(2).shard(2, 1).map(pair).batch(3)
    ),
    "shuffle after map": lambda: rows().map(decode).shuffle(10, seed=3).batch(4),
    "no reshuffle": lambda: (
        rows().map(decode).shuffle(10, 3, reshuffle_each_iteration=False).repeat(2).batch(4)
    ),
    "steps after batch": lambda: rows().map(decode).batch(4).repeat(3).take(8).skip(1).prefetch(1),
    "batches shuffled": lambda: rows().map(decode).batch(4).shuffle(3, seed=2),
    "parallel batch": lambda: rows().map(decode).batch(4, num_parallel_calls=2),
    "padded_batch": lambda: rows().map(decode).padded_batch(4, [3], padding_values=-1.0),
    "zip": lambda: tf.data.Dataset.zip((rows().map(decode), rows().map(pair))).batch(4),
    "enumerate": lambda: rows().map(decode).enumerate().batch(4),
    "interleave": lambda: (
        (
            tf.data.Dataset.range(3).interleave(
                lambda i: rows(), PARALLEL, num_parallel_calls=PARALLEL
            )
        )
        .map(decode)
        .batch(4)
    ),
    "filter of elements": lambda: rows().filter(lambda x: x[0] < 9).map(decode).batch(4),
    "cache of elements": lambda: rows().cache().map(decode).batch(4),
    "texts": lambda: numbers(9).map(tf.strings.to_number).batch(4),
    "branches, checks, tables": lambda: rows().map(checked).batch(4),
    "unknown length": lambda: rows().take(9).filter(lambda x: x[0] > 3).map(decode).batch(4),
    "options": lambda: rows().map(decode).with_options(tf.data.Options()).batch(4),
    "cardinality": lambda: (
        rows()
        .filter(lambda x: x[0] < 9)
        .map(decode)
        .apply(tf.data.experimental.assert_cardinality(5))
        .batch(4)
        .apply(tf.data.experimental.assert_cardinality(2))
    ),
    "weights of classes": lambda: TFDatasetAdapter(
        rows().map(lambda x: (x, tf.cast(x[0] > 9, tf.int32))).batch(4), {0: 0.5, 1: 2.0}
    ).get_tf_dataset(),
}

REFUSED = {
    "cache follows map (decode)": lambda: rows().map(decode).cache().batch(4),
    "filter (lambda) follows map (decode)": lambda: (
        rows().map(decode).filter(lambda x: x[0] < 9).map(pair).batch(4)
    ),
    "flat_map (several) follows map (decode)": lambda: (
        rows().map(decode).flat_map(several).batch(4)
    ),
    "flat_map (nested) has maps inside": lambda: rows().flat_map(nested).batch(4),
    "interleave (nested) has maps inside": lambda: rows().interleave(nested).batch(4),
    "ignore_errors follows map (decode)": lambda: rows().map(decode).ignore_errors().batch(4),
    "concatenate follows map (decode)": lambda: rows().map(decode).concatenate(rows()).batch(4),
    "from_generator": lambda: generated().map(decode).batch(4),
    "from_generator makes elements": lambda: generated().batch(4),
    "map (in_python) calls Python": lambda: rows().map(in_python).batch(4),
    "map (lambda) has a state (ReadVariableOp)": lambda: rows().map(lambda x: x + COUNT).batch(4),
    "map (lambda) has a state (AssignAddVariableOp)": lambda: (
        rows().map(lambda x: x + COUNT.assign_add(1.0)).batch(4)
    ),
    "map (draw) has a state (RandomStandardNormal)": lambda: rows().map(draw).batch(4),
    "map (decode) has no order": lambda: rows().map(decode, 2, deterministic=False).batch(4),
    "has no order (deterministic=False)": lambda: (
        rows().map(decode, 2).batch(4).with_options(UNORDERED)
    ),
    "padded_batch pads to the longest": lambda: rows().map(open_shape).padded_batch(4, [None]),
    "filter (lambda) gives elements of open shapes": lambda: (
        rows().batch(3).filter(lambda x: True).map(decode).batch(4)
    ),
    "map (pair) follows batch": lambda: rows().map(decode).batch(4).map(pair),
    "rebatch follows batch": lambda: rows().map(decode).batch(4).rebatch(2),
    "map (decode) is followed by no batch": lambda: rows().map(decode),
    "dense": lambda: rows().map(lambda x: tf.sparse.from_dense(x)).batch(4),
}


def chosen(batch):
    """Return the last two elements of a batch, or its only one, and its number of elements."""
    first = tf.nest.flatten(batch)[0]
    return tf.nest.map_structure(lambda part: part[-2:], batch), {"n": tf.shape(first)[0]}


class OwnRows(NamedTuple):
    rows: Any
    n: Any
    n_static: Any


def joined(elements, notes, n_rows):
    return OwnRows(elements, notes["n"], tf.zeros([0 if n_rows is None else n_rows]))


def on_last_rows(data):
    return RowMaps.of(data).on_chosen_rows(chosen, lambda n: min(n, 2), joined)


def require_last_rows(whole_batches, own_batches):
    assert len(own_batches) == len(whole_batches) > 0
    for whole, own in zip(whole_batches, own_batches, strict=True):
        tf.nest.assert_same_structure(whole, own.rows)
        for part, of_own in zip(tf.nest.flatten(whole), tf.nest.flatten(own.rows), strict=True):
            np.testing.assert_array_equal(of_own, part[-2:])
            assert own.n == len(part) and len(own.n_static) in (0, len(part))


@pytest.mark.parametrize("name", MOVED)
def test_chosen_rows_are_those_of_whole_batches(name):
    data, again = (MOVED[name]() for _ in range(2))
    own = on_last_rows(again)
    assert int(own.cardinality()) == int(data.cardinality())
    for _ in range(2):
        require_last_rows([*data.as_numpy_iterator()], [*own.as_numpy_iterator()])


def test_shuffles_of_both_ways_take_turns():
    """Batches that a script reads before `fit` move the order of `fit`, and the other way round."""

    def shuffled():
        tf.random.set_seed(1)
        return rows().shuffle(10).map(decode).shuffle(5).batch(4).shuffle(2)

    data, mixed = shuffled(), shuffled()
    own = on_last_rows(mixed)
    passes = [[*data.as_numpy_iterator()] for _ in range(4)]
    assert (passes[0][0] != passes[1][0]).any()
    np.testing.assert_array_equal(passes[0][0], next(mixed.as_numpy_iterator()))
    require_last_rows(passes[1], [*own.as_numpy_iterator()])
    np.testing.assert_array_equal(passes[2][0], next(mixed.as_numpy_iterator()))
    require_last_rows(passes[3], [*on_last_rows(mixed).as_numpy_iterator()])


@pytest.mark.parametrize("name", REFUSED)
def test_the_step_that_needs_whole_batches_is_named(name):
    with pytest.raises(UnmovedError) as caught:
        RowMaps.of(REFUSED[name]())
    assert name in str(caught.value)


def test_nothing_is_said_where_nothing_is_mapped():
    files = tf.data.Dataset.range(3).interleave(lambda i: rows())
    for data in (rows().shuffle(10).batch(4).prefetch(1), files.cache().batch(4), rows()):
        assert RowMaps.of(data) is None


def table(words):
    values = tf.range(len(words))
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(words, values), -1)


def test_fingerprints_tell_functions_constants_tables_and_texts_apart():
    def of_map(function, data=None):
        return RowMaps.of((data or rows()).map(function).batch(4)).fingerprint()

    def of_table(words):
        found = table(words)
        return of_map(lambda x: (found.lookup(tf.constant("b")), x))

    ones, zeros = np.ones(2, "float32"), np.zeros(2, "float32")
    equal = (
        (of_map(lambda x: x + ones), of_map(lambda y: y + ones)),
        (of_table(["a", "b"]), of_table(["a", "b"])),
        (of_map(tf.strings.length, numbers(3)), of_map(tf.strings.length, numbers(3))),
    )
    assert all(one == other for one, other in equal)
    others = (
        *(of_map(lambda x: x + zeros), of_map(lambda x: x - ones)),
        *(of_map(lambda x, noise=noise: x + noise) for noise in (tf.ones(2), tf.zeros(2))),
        *(of_table(["b", "a"]), of_map(tf.strings.length, numbers(4))),
    )
    assert len({*others, *(one for one, _ in equal)}) == 9


def test_maps_are_called_for_chosen_rows_only():
    n_calls = 0

    def count(x):
        nonlocal n_calls
        n_calls += 1
        return x

    def counted(x):
        return tf.ensure_shape(tf.numpy_function(count, [x], x.dtype, stateful=False), [2])

    for calls in (None, 2):
        n_calls = 0
        own = on_last_rows(rows().map(counted, calls).batch(4))
        assert len([*own]) == 3 and n_calls == 6
