"""Collectives that send rows to other ranks: alltoall and reducescatter, eager and traced."""

import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.ranks import in_both_modes, require_error
from tests.parallel.cases_collectives_rows import plain, repeated
from tfscale import Average, Max, Sum


def case_alltoall_of_equal_parts():
    rank, size = tfscale.rank(), tfscale.size()
    for dtype in (tf.float32, tf.int64, tf.bfloat16):
        own = tf.cast(tf.repeat(10 * rank + tf.range(size), 2), dtype)
        for result in in_both_modes(tfscale.alltoall, own):
            np.testing.assert_array_equal(
                plain(result), np.repeat(10 * np.arange(size) + rank, 2), str(dtype)
            )


def rows_between(sender, receiver):
    return (sender + 2 * receiver) % 3  # 0, 1 or 2


def case_alltoall_of_different_parts():
    rank, size = tfscale.rank(), tfscale.size()
    splits = [rows_between(rank, r) for r in range(size)]
    own = tf.constant(np.repeat(10 * rank + np.arange(size), splits), tf.float32)[:, tf.newaxis]
    received = [rows_between(r, rank) for r in range(size)]
    for result, rows in in_both_modes(lambda x: tfscale.alltoall(x, splits), own):
        np.testing.assert_array_equal(rows.numpy(), received)
        np.testing.assert_array_equal(
            result.numpy()[:, 0], repeated(received, 10 * np.arange(size) + rank)
        )


def case_alltoall_of_nothing():
    size = tfscale.size()
    for result, rows in in_both_modes(lambda x: tfscale.alltoall(x, [0] * size), tf.zeros([0, 2])):
        assert result.shape == (0, 2)
        np.testing.assert_array_equal(rows.numpy(), [0] * size)


def case_alltoall_to_the_next_rank_only():
    rank, size = tfscale.rank(), tfscale.size()
    splits = np.where(np.arange(size) == (rank + 1) % size, 3, 0)
    for result, rows in in_both_modes(
        lambda x: tfscale.alltoall(x, tf.constant(splits)), tf.fill([3], float(rank))
    ):
        before = (rank - 1) % size
        np.testing.assert_array_equal(result.numpy(), [before] * 3)
        np.testing.assert_array_equal(rows.numpy(), np.where(np.arange(size) == before, 3, 0))


def case_alltoall_that_does_not_add_up():
    size = tfscale.size()
    own = tf.zeros([size + 1])
    if size > 1:
        require_error(
            lambda: tfscale.alltoall(own),
            f"ConfigError: Without splits the rows must be a multiple of the {size} ranks.",
            "Pass splits.",
        )
    for splits in ([1] * size, [size + 2] + [-1] * (size - 1) if size > 1 else [-1]):
        require_error(
            lambda splits=splits: tfscale.alltoall(own, splits),
            f"ConfigError: splits must be 0 or more and add up to the {size + 1} rows",
        )
    require_error(lambda: tfscale.alltoall(own, [1] * (size + 1)), "ConfigError: splits must be")
    require_error(lambda: tfscale.alltoall(own, [1.0] * size), "Received: dtype=float32")
    require_error(lambda: tfscale.alltoall(tf.constant(1.0)), "ConfigError: Without splits")
    with pytest.raises(tf.errors.InvalidArgumentError, match="Without splits"):  # as Horovod's
        tfscale.alltoall(tf.constant(1.0))


def case_gradient_of_alltoall():
    rank, size = tfscale.rank(), tfscale.size()
    splits = [rows_between(rank, r) for r in range(size)]

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, _ = tfscale.alltoall(x, splits)
            loss = tf.reduce_sum(y * y) * (rank + 1.0)
        return tape.gradient(loss, x)

    own = tf.constant(np.repeat(10 * rank + np.arange(size), splits), tf.float64)
    expected = 2 * own.numpy() * np.repeat(np.arange(size) + 1.0, splits)
    for result in in_both_modes(gradient, own):
        np.testing.assert_array_equal(result.numpy(), expected)


def part_of_rows(n_rows):
    """First row and number of rows of this rank; the first ranks have one row more."""
    rank, size = tfscale.rank(), tfscale.size()
    n_own = n_rows // size + (rank < n_rows % size)
    return rank * (n_rows // size) + min(rank, n_rows % size), n_own


def case_reducescatter_of_any_number_of_rows():
    rank, size = tfscale.rank(), tfscale.size()
    for n_rows in (0, 1, size, 2 * size + 1, 97):
        own = tf.reshape(tf.range(2 * n_rows, dtype=tf.float64), [n_rows, 2]) + rank
        begin, n_own = part_of_rows(n_rows)
        rows = np.arange(2 * n_rows, dtype="float64").reshape(n_rows, 2)[begin : begin + n_own]
        for result in in_both_modes(lambda x: tfscale.reducescatter(x, op=Sum), own):
            np.testing.assert_array_equal(result.numpy(), size * rows + size * (size - 1) / 2)
        for result in in_both_modes(tfscale.reducescatter, own):
            np.testing.assert_allclose(result.numpy(), rows + (size - 1) / 2, rtol=1e-15)
        result = tfscale.reducescatter(own, op=Max, prescale_factor=2.0, postscale_factor=0.5)
        np.testing.assert_array_equal(result.numpy(), rows + size - 1)


def case_grouped_reducescatter():
    rank, size = tfscale.rank(), tfscale.size()
    rows = np.arange(2 * size, dtype="float32").reshape(size, 2)
    numbers = np.arange(3 * size, dtype="int64")
    own = [tf.constant(rows + rank), tf.constant(numbers + rank)]
    ranks = size * (size - 1) // 2  # their sum
    for one, three in in_both_modes(lambda *x: tfscale.grouped_reducescatter(x, op=Sum), *own):
        np.testing.assert_array_equal(one.numpy(), size * rows[rank : rank + 1] + ranks)
        wanted = size * numbers[3 * rank : 3 * rank + 3] + ranks
        np.testing.assert_array_equal(three.numpy(), wanted)
    for one in in_both_modes(lambda x: tfscale.grouped_reducescatter([x])[0], own[0]):
        np.testing.assert_allclose(one.numpy(), rows[rank : rank + 1] + ranks / size, rtol=1e-6)


def case_gradient_of_reducescatter():
    rank, size = tfscale.rank(), tfscale.size()
    n_rows = 2 * size + 1
    owner = np.concatenate([np.full(n_rows // size + (r < n_rows % size), r) for r in range(size)])

    def gradient(x, op, kind="adjoint"):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfscale.reducescatter(x, op=op, prescale_factor=0.5, gradient=kind)
            loss = tf.reduce_sum(y) * (rank + 1.0)
        return tape.gradient(loss, x)

    own = tf.ones([n_rows], tf.float64)
    for result in in_both_modes(lambda x: gradient(x, Sum), own):
        np.testing.assert_array_equal(result.numpy(), 0.5 * (owner + 1))
    for result in in_both_modes(lambda x: gradient(x, Average), own):
        np.testing.assert_allclose(result.numpy(), 0.5 * (owner + 1) / size, rtol=1e-15)
    for kind in (None, "horovod"):
        for result in in_both_modes(lambda x, kind=kind: gradient(x, Sum, kind), own):
            np.testing.assert_allclose(result.numpy(), 0.5 * (owner + 1) * size, rtol=1e-15)
        for result in in_both_modes(lambda x, kind=kind: gradient(x, Average, kind), own):
            np.testing.assert_allclose(result.numpy(), 0.5 * (owner + 1), rtol=1e-15)


def case_group_of_scattered_sums_with_factors():
    size = tfscale.size()
    own = [tf.ones([size, 2]), tf.fill([2 * size], 2.0)]
    pair = tfscale.grouped_reducescatter(own, Sum, prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_array_equal(pair[0].numpy(), np.full([1, 2], 2.0 * size))
    np.testing.assert_array_equal(pair[1].numpy(), np.full([2], 4.0 * size))
