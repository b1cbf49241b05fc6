"""Collectives that move rows, eager and traced; expected values in closed form of rank and size."""

import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import in_both_modes, require_error
from tests.parallel.rank_values import gradients, plain
from tfscale import Average, Max, Sum

rank, size = tfscale.rank(), tfscale.size()  # only ranks import this

MOVABLE = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.uint8, tf.int64, tf.bool)


def repeated(counts, values):
    return np.repeat(np.asarray(values, "float64"), counts)


def case_allgather():
    """Of different lengths, of nothing on rank 0, of nothing, of scalars."""
    expected = repeated(np.arange(1, size + 1), np.arange(size) % 2)
    for dtype in MOVABLE:
        own = tf.cast(tf.fill([rank + 1, 2], rank % 2), dtype)
        for result in in_both_modes(tfscale.allgather, own):
            assert result.dtype == dtype
            np.testing.assert_array_equal(plain(result), np.stack([expected] * 2, 1), str(dtype))
    numbers = np.arange(size)
    for own, expected in (
        (tf.fill([rank, 3], float(rank)), np.stack([repeated(numbers, numbers)] * 3, 1)),
        (tf.zeros([0, 3]), np.zeros([0, 3])),
        (tf.constant(rank), numbers),
        (tf.constant(rank == 0), numbers == 0),
    ):
        for result in in_both_modes(tfscale.allgather, own):
            np.testing.assert_array_equal(result, expected)


def case_grouped_allgather():
    own = [tf.fill([rank + 1], float(rank)), tf.fill([1, 2], rank)]
    for first, second in in_both_modes(lambda *x: tfscale.grouped_allgather(x), *own):
        np.testing.assert_array_equal(first, repeated(np.arange(1, size + 1), np.arange(size)))
        np.testing.assert_array_equal(second, np.stack([np.arange(size)] * 2, 1))


def case_gradient_of_allgather():

    def loss_of(x, kind):
        y = tfscale.allgather(x, gradient=kind)
        rows = tf.range(tf.shape(y)[0], dtype=y.dtype)
        return (rank + 1.0) * tf.reduce_sum(rows[:, tf.newaxis] * y)

    own = tf.ones([rank + 1, 2], tf.float64)
    first = rank * (rank + 1) // 2  # rows of the ranks before this one
    expected = np.arange(first, first + rank + 1) * (size * (size + 1) / 2)
    for kind, divisor in (("adjoint", 1), (None, size), ("horovod", size)):
        for result in gradients(lambda x, kind=kind: loss_of(x, kind), own):
            np.testing.assert_allclose(result, np.stack([expected] * 2, 1) / divisor, rtol=1e-15)
    require_error(lambda: loss_of(own, "exact"), "gradient must be 'horovod' or 'adjoint'")


def case_broadcast_from_every_rank():
    for root in range(size):
        for dtype in MOVABLE:
            own = tf.cast(tf.constant([[rank + 1, 0], [1, rank]]), dtype)
            expected = plain(tf.cast(tf.constant([[root + 1, 0], [1, root]]), dtype))
            for result in in_both_modes(lambda x, r=root: tfscale.broadcast(x, r), own):
                np.testing.assert_array_equal(plain(result), expected, f"{root} {dtype}")


def case_small_variables_are_broadcast_together():
    """Of any dtype, with and without values, and one whose shape changes, from any root."""
    kinds = ("float64", "uint32", "bool", "bfloat16", "int64")
    values = [
        tf.cast(tf.fill(shape, rank + i), kinds[i % 5])
        for i, shape in enumerate([(), (3,), (2, 0), (2, 2)] * 10)
    ]
    values.append(tf.fill([2 << 19], rank + 0.5))  # too large for a message with others
    variables = [tf.Variable(v) for v in values]
    variables.append(tf.Variable([[rank]], shape=[None, 1]))
    variables.append(tf.Variable("a string, which stays"))
    for root in range(size):
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)
        variables[-2].assign([[rank]] * 2)
        tfscale.broadcast_variables(variables, root)
        for i, variable in enumerate(variables[:40]):
            expected = tf.cast(tf.fill(variable.shape, root + i), variable.dtype)
            np.testing.assert_array_equal(plain(variable), plain(expected), f"{i} from {root}")
        np.testing.assert_array_equal(variables[40], np.full(2 << 19, root + 0.5, "float32"))
        assert variables[41].numpy().tolist() == [[root], [root]]


@sizes(2, 3, 4)
def case_variables_that_differ_are_refused_by_name():
    widths = [1, 1, 1 + (rank == size - 1), 1]
    variables = [tf.Variable(tf.ones([w]), name=f"v{i}") for i, w in enumerate(widths)]
    others = ", ".join(map(str, range(size - 1)))
    label = "number 2, v2:0="
    texts = f"{label}float32(1,) on rank {others} and {label}float32(2,) on rank {size - 1}"
    require_error(lambda: tfscale.broadcast_variables(variables), "ExchangeError", texts)
    fewer = variables[: 2 - (rank == size - 1)]
    texts = f"number 1, v1:0=float32(1,) on rank {others} and no number 1, v1:0 on rank {size - 1}"
    require_error(lambda: tfscale.broadcast_variables(fewer), "ExchangeError", texts)


@sizes(2, 3, 4)
def case_different_widths_and_roots_are_refused():
    require_error(
        lambda: tfscale.allgather(tf.zeros([1, 2 + rank])),
        "ExchangeError: ranks called different collectives",
        "rank 0 calls allgather(float32[2]) and rank 1 calls allgather(float32[3])",
    )
    require_error(
        lambda: tfscale.broadcast(tf.zeros([1]), min(rank, 1)),
        "rank 0 calls broadcast(float32[1]) [0] and rank 1 calls broadcast(float32[1]) [1]",
    )


def case_gradient_of_broadcast():
    root = size - 1
    expected = 2.0 * 3.0 * size * (size + 1) / 2 if rank == root else 0.0
    for kind, divisor in (("adjoint", 1), (None, size), ("horovod", size)):

        def loss_of(x, kind=kind):
            return tf.reduce_sum(tfscale.broadcast(x * x, root, gradient=kind)) * (rank + 1.0)

        for result in gradients(loss_of, tf.fill([2], 3.0)):
            np.testing.assert_allclose(result, [expected / divisor] * 2, rtol=1e-6)


def rows_between(sender, receiver):
    return (sender + 2 * receiver) % 3  # 0, 1 or 2


def case_alltoall():
    """Of equal parts, of different ones, of nothing, and to the next rank only."""
    ranks = np.arange(size)
    for dtype in (tf.float32, tf.int64, tf.bfloat16):
        own = tf.cast(tf.repeat(10 * rank + tf.range(size), 2), dtype)
        for result in in_both_modes(tfscale.alltoall, own):
            np.testing.assert_array_equal(plain(result), np.repeat(10 * ranks + rank, 2))
    splits = [rows_between(rank, r) for r in range(size)]
    received = [rows_between(r, rank) for r in range(size)]
    before = (rank - 1) % size
    for own, parts, expected, counts in (
        (
            np.repeat(10.0 * rank + ranks, splits)[:, np.newaxis],
            splits,
            repeated(received, 10 * ranks + rank)[:, np.newaxis],
            received,
        ),
        (np.zeros([0, 2]), [0] * size, np.zeros([0, 2]), [0] * size),
        (
            np.full(3, float(rank)),
            tf.constant(np.where(ranks == (rank + 1) % size, 3, 0)),
            [before] * 3,
            np.where(ranks == before, 3, 0),
        ),
    ):
        for result, rows in in_both_modes(
            lambda x, parts=parts: tfscale.alltoall(x, parts), tf.constant(own, tf.float32)
        ):
            np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(rows, counts)


def case_alltoall_that_does_not_add_up():
    own = tf.zeros([size + 1])
    if size > 1:
        text = f"ConfigError: splits must be given unless the {size} ranks divide the rows."
        require_error(lambda: tfscale.alltoall(own), text)
    text = f"ConfigError: splits must be 0 or more and add up to the {size + 1} rows"
    for splits in ([1] * size, [size + 2, *[-1] * (size - 1)]):
        require_error(lambda splits=splits: tfscale.alltoall(own, splits), text)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="splits must be given"
    ):  # as Horovod's
        tfscale.alltoall(tf.constant(1.0))


def case_gradient_of_alltoall():
    splits = [rows_between(rank, r) for r in range(size)]

    def loss_of(x):
        y, _ = tfscale.alltoall(x, splits)
        return tf.reduce_sum(y * y) * (rank + 1.0)

    own = tf.constant(np.repeat(10 * rank + np.arange(size), splits), tf.float64)
    expected = 2 * own.numpy() * np.repeat(np.arange(size) + 1.0, splits)
    for result in gradients(loss_of, own):
        np.testing.assert_array_equal(result, expected)


def part_of_rows(n_rows):
    """Rows of this rank; the first ranks have one more."""
    begin = rank * (n_rows // size) + min(rank, n_rows % size)
    return slice(begin, begin + n_rows // size + (rank < n_rows % size))


def case_reducescatter_of_any_number_of_rows():
    for n_rows in (0, 1, size, 2 * size + 1, 97):
        own = tf.reshape(tf.range(2 * n_rows, dtype=tf.float64), [n_rows, 2]) + rank
        rows = np.arange(2.0 * n_rows).reshape(n_rows, 2)[part_of_rows(n_rows)]
        for result in in_both_modes(lambda x: tfscale.reducescatter(x, op=Sum), own):
            np.testing.assert_array_equal(result, size * rows + size * (size - 1) / 2)
        for result in in_both_modes(tfscale.reducescatter, own):
            np.testing.assert_allclose(result, rows + (size - 1) / 2, rtol=1e-15)
        result = tfscale.reducescatter(own, op=Max, prescale_factor=2.0, postscale_factor=0.5)
        np.testing.assert_array_equal(result, rows + size - 1)


def case_grouped_reducescatter():
    rows = np.arange(2 * size, dtype="float32").reshape(size, 2)
    numbers = np.arange(3 * size, dtype="int64")
    own = [tf.constant(rows + rank), tf.constant(numbers + rank)]
    ranks = size * (size - 1) // 2  # their sum
    for one, three in in_both_modes(lambda *x: tfscale.grouped_reducescatter(x, op=Sum), *own):
        np.testing.assert_array_equal(one, size * rows[rank : rank + 1] + ranks)
        wanted = size * numbers[3 * rank : 3 * rank + 3] + ranks
        np.testing.assert_array_equal(three, wanted)
    for one in in_both_modes(lambda x: tfscale.grouped_reducescatter([x])[0], own[0]):
        np.testing.assert_allclose(one, rows[rank : rank + 1] + ranks / size, rtol=1e-6)
    own = [tf.ones([size, 2]), tf.fill([2 * size], 2.0)]
    pair = tfscale.grouped_reducescatter(own, Sum, prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_array_equal(pair[0], np.full([1, 2], 2.0 * size))
    np.testing.assert_array_equal(pair[1], np.full([2], 4.0 * size))


def case_gradient_of_reducescatter():
    n_rows = 2 * size + 1
    owner = np.concatenate([np.full(n_rows // size + (r < n_rows % size), r) for r in range(size)])
    exact = 0.5 * (owner + 1)
    for kind, op, expected in (
        ("adjoint", Sum, exact),
        ("adjoint", Average, exact / size),
        *((kind, Sum, exact * size) for kind in (None, "horovod")),
        *((kind, Average, exact) for kind in (None, "horovod")),
    ):

        def loss_of(x, kind=kind, op=op):
            y = tfscale.reducescatter(x, op=op, prescale_factor=0.5, gradient=kind)
            return tf.reduce_sum(y) * (rank + 1.0)

        for result in gradients(loss_of, tf.ones([n_rows], tf.float64)):
            np.testing.assert_allclose(result, expected, rtol=1e-15)
