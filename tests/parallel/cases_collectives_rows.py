"""Collectives that move rows, eager and traced; expected values in closed form of rank and size."""

import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import in_both_modes, require_error
from tests.helpers.spawn import sizes

MOVABLE = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.uint8, tf.int64, tf.bool)


def plain(tensor):
    return tf.cast(tensor, tf.float64).numpy()


def repeated(counts, values):
    return np.repeat(np.asarray(values, "float64"), counts)


def case_allgather_of_different_lengths():
    rank, size = tfscale.rank(), tfscale.size()
    expected = repeated(np.arange(1, size + 1), np.arange(size) % 2)
    for dtype in MOVABLE:
        own = tf.cast(tf.fill([rank + 1, 2], rank % 2), dtype)
        for result in in_both_modes(tfscale.allgather, own):
            assert result.dtype == dtype
            np.testing.assert_array_equal(plain(result), np.stack([expected] * 2, 1), str(dtype))


def case_allgather_of_nothing():
    rank, size = tfscale.rank(), tfscale.size()
    own = tf.fill([rank, 3], float(rank))  # rank 0 has no rows
    for result in in_both_modes(tfscale.allgather, own):
        np.testing.assert_array_equal(
            result.numpy()[:, 0], repeated(np.arange(size), np.arange(size))
        )
    for result in in_both_modes(tfscale.allgather, tf.zeros([0, 3])):
        assert result.shape == (0, 3)


def case_allgather_of_scalars():
    expected = np.arange(tfscale.size())
    for result in in_both_modes(tfscale.allgather, tf.constant(tfscale.rank())):
        np.testing.assert_array_equal(result.numpy(), expected)
    flags = tfscale.allgather(tf.constant(tfscale.rank() == 0))
    np.testing.assert_array_equal(flags.numpy(), expected == 0)


def case_grouped_allgather():
    rank, size = tfscale.rank(), tfscale.size()
    own = [tf.fill([rank + 1], float(rank)), tf.fill([1, 2], rank)]
    for first, second in in_both_modes(lambda *x: tfscale.grouped_allgather(x), *own):
        counts = np.arange(1, size + 1)
        np.testing.assert_array_equal(first.numpy(), repeated(counts, np.arange(size)))
        np.testing.assert_array_equal(second.numpy(), np.stack([np.arange(size)] * 2, 1))


def case_gradient_of_allgather():
    rank, size = tfscale.rank(), tfscale.size()

    def gradient(x, kind):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfscale.allgather(x, gradient=kind)
            rows = tf.range(tf.shape(y)[0], dtype=y.dtype)
            loss = (rank + 1.0) * tf.reduce_sum(rows[:, tf.newaxis] * y)
        return tape.gradient(loss, x)

    own = tf.ones([rank + 1, 2], tf.float64)
    first = rank * (rank + 1) // 2  # rows of the ranks before this one
    expected = np.arange(first, first + rank + 1) * (size * (size + 1) / 2)
    for result in in_both_modes(lambda x: gradient(x, "adjoint"), own):
        np.testing.assert_array_equal(result.numpy(), np.stack([expected] * 2, 1))
    for kind in (None, "horovod"):
        for result in in_both_modes(lambda x, kind=kind: gradient(x, kind), own):
            np.testing.assert_allclose(result.numpy(), np.stack([expected] * 2, 1) / size)
    require_error(lambda: gradient(own, "exact"), "gradient must be 'horovod' or 'adjoint'")


@sizes(2, 3, 4)
def case_allgather_of_different_widths_is_refused():
    require_error(
        lambda: tfscale.allgather(tf.zeros([1, 2 + tfscale.rank()])),
        "ExchangeError: All ranks must call the same",
        "rank 0 calls allgather(float32[2]) and rank 1 calls allgather(float32[3])",
    )


def case_broadcast_from_every_rank():
    rank = tfscale.rank()
    for root in range(tfscale.size()):
        for dtype in MOVABLE:
            own = tf.cast(tf.constant([[rank + 1, 0], [1, rank]]), dtype)
            expected = plain(tf.cast(tf.constant([[root + 1, 0], [1, root]]), dtype))
            for result in in_both_modes(lambda x, r=root: tfscale.broadcast(x, r), own):
                np.testing.assert_array_equal(plain(result), expected, f"{root} {dtype}")


@sizes(2, 3, 4)
def case_broadcast_from_different_roots_is_refused():
    require_error(
        lambda: tfscale.broadcast(tf.zeros([1]), min(tfscale.rank(), 1)),
        "rank 0 calls broadcast(float32[1]) [0] and rank 1 calls broadcast(float32[1]) [1]",
    )


def case_gradient_of_broadcast():
    rank, size = tfscale.rank(), tfscale.size()
    root = size - 1

    def gradient(x, kind):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tfscale.broadcast(x * x, root, gradient=kind)) * (rank + 1.0)
        return tape.gradient(loss, x)

    expected = 2.0 * 3.0 * size * (size + 1) / 2 if rank == root else 0.0
    for result in in_both_modes(lambda x: gradient(x, "adjoint"), tf.fill([2], 3.0)):
        np.testing.assert_array_equal(result.numpy(), [expected] * 2)
    for kind in (None, "horovod"):
        for result in in_both_modes(lambda x, kind=kind: gradient(x, kind), tf.fill([2], 3.0)):
            np.testing.assert_allclose(result.numpy(), [expected / size] * 2, rtol=1e-6)
