"""Reductions over ranks, eager and traced; expected values in closed form of rank and size."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import in_both_modes, require_error
from tests.parallel.rank_values import gradients, plain, ramp, rank_sum
from tfscale import Average, Max, Min, Product, Sum

rank, size = tfscale.rank(), tfscale.size()  # only ranks import this
DTYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
SIGNED = (*DTYPES, tf.int8)
LENGTHS = (0, 1, 7, 1000)


def case_reductions_of_every_dtype():
    products = [math.prod(r - 2 for r in range(size)), math.prod(2 - r for r in range(size))]
    values = [rank - 2, 2 - rank, rank + 1]
    for op, dtypes, own, expected in (
        *(
            (Sum, (*DTYPES, tf.uint8), ramp(n) + rank, size * ramp(n) + rank_sum(size))
            for n in LENGTHS
        ),
        (Average, DTYPES, 2 * ramp(100) + 2 * rank, 2 * ramp(100) + size - 1),  # whole numbers
        (Min, SIGNED, values, [-2, 3 - size, 1]),
        (Max, SIGNED, values, [size - 3, 2, size]),
        (Product, SIGNED, values, [*products, math.factorial(size)]),
    ):
        for dtype in dtypes:
            for result in in_both_modes(
                lambda x, op=op: tfscale.allreduce(x, op=op), tf.cast(own, dtype)
            ):
                assert result.dtype == dtype
                np.testing.assert_array_equal(plain(result), expected, f"{op} {dtype}")


def case_averages_of_integers_do_not_overflow():
    """Nor do scaled sums; what the dtype does not hold becomes the nearest value."""

    def scaled(x):
        return tfscale.allreduce(x, op=Sum, prescale_factor=2.0, postscale_factor=0.5 / size)

    def scattered(x):
        return tfscale.allgather(tfscale.reducescatter(x))

    for dtype in (tf.int8, tf.uint8, tf.int32):
        for value in (dtype.max, dtype.max - 7, dtype.min):
            own = tf.constant([value] * 4, dtype)
            for reduce in (tfscale.allreduce, scaled, scattered):
                for result in in_both_modes(reduce, own):
                    assert result.dtype == dtype
                    np.testing.assert_array_equal(plain(result), [value] * 4, f"{reduce} {dtype}")
            largest = tfscale.allreduce(own, op=Sum, postscale_factor=2.0)
            nearest = np.clip(2 * size * int(value), dtype.min, dtype.max)
            np.testing.assert_array_equal(plain(largest), [nearest] * 4)


def case_average_of_float64_keeps_all_digits():
    own = tf.constant([1 / 3, math.pi, 1e300, 1e-300], tf.float64) * (rank + 1)
    for result in in_both_modes(tfscale.allreduce, own):
        mean = np.array([1 / 3, math.pi, 1e300, 1e-300]) * (size + 1) / 2
        np.testing.assert_allclose(result.numpy(), mean, rtol=4 * np.finfo(np.float64).eps)


def case_nan_and_infinity_reach_all_ranks():
    last = size - 1
    own = tf.constant([np.nan if rank == last else 1.0, np.inf if last == 0 else 2.0])
    for op in (Sum, Average, Min, Max, Product):
        assert np.isnan(tfscale.allreduce(own, op=op).numpy()[0]), op
    opposite = tf.constant([np.inf if rank % 2 else -np.inf])
    total = tfscale.allreduce(opposite, op=Sum).numpy()[0]
    assert np.isnan(total) if size > 1 else np.isinf(total)


def case_factors_before_and_after():
    own = tf.constant([1.0, -4.0], tf.float64) * (rank + 1)
    total = np.array([1.0, -4.0]) * (rank_sum(size) + size)

    def scaled(x, op):
        return tfscale.allreduce(x, op=op, prescale_factor=0.5, postscale_factor=4.0)

    for result in in_both_modes(lambda x: scaled(x, Sum), own):
        np.testing.assert_array_equal(result.numpy(), 2 * total)
    for result in in_both_modes(lambda x: scaled(x, Average), own):
        np.testing.assert_allclose(result.numpy(), 2 * total / size, rtol=1e-15)
    highest = tfscale.allreduce(own, op=Max, prescale_factor=-1.0, postscale_factor=3.0)
    np.testing.assert_array_equal(highest.numpy(), [-3.0, 12.0 * size])


def case_grouped_of_mixed_dtypes():
    shapes = ((3,), (), (2, 2), (0,), (5, 1))
    dtypes = (tf.float32, tf.int64, tf.float64, tf.float32, tf.int64)
    own = [
        tf.cast(tf.fill(s, i + rank), d)
        for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    for op in (Sum, Max):
        for results in in_both_modes(lambda *x, op=op: tfscale.grouped_allreduce(x, op=op), *own):
            for i, (result, tensor) in enumerate(zip(results, own, strict=True)):
                assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
                value = i * size + rank_sum(size) if op == Sum else i + size - 1
                np.testing.assert_array_equal(result.numpy(), np.full(tensor.shape, value))


def case_gradient_of_a_reduction():
    own = tf.constant([1.0, 2.0, -3.0], tf.float64) * (rank + 1)
    total = 2 * own.numpy() * 1.5 * (rank_sum(size) + size)
    for op, expected in ((Sum, total), (Average, total / size)):

        def loss_of(x, op=op):
            y = tfscale.allreduce(x * x, op=op, prescale_factor=0.5, postscale_factor=3.0)
            return tf.reduce_sum(y) * (rank + 1)

        for result in gradients(loss_of, own):
            np.testing.assert_allclose(result, expected, rtol=1e-15)


def case_gradient_of_a_group():

    def loss_of(own):
        a, b = tfscale.grouped_allreduce([own[0], 2.0 * own[1]], op=Sum)
        return (tf.reduce_sum(a) + tf.reduce_sum(b)) * (rank + 1.0)

    for x, y in gradients(loss_of, [tf.ones([2]), tf.ones([3, 1])]):
        np.testing.assert_array_equal(x, np.full(2, rank_sum(size) + size))
        np.testing.assert_array_equal(y, np.full((3, 1), 2.0 * (rank_sum(size) + size)))


def case_extremes_have_no_gradient():
    def gradient():
        x = tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfscale.allreduce(x, op=Max)
        return tape.gradient(y, x)

    require_error(gradient, "op must be Sum or Average for gradients. Received: op=Max.")
    require_error(tf.function(gradient), "op must be Sum or Average for gradients.")


@sizes(2, 3, 4)
def case_differences_name_both_ranks():
    is_last, last = rank == size - 1, f"rank {size - 1} calls"
    different = tfscale.allgather if is_last else tfscale.allreduce
    for call, *texts in (
        (
            lambda: tfscale.allreduce(tf.zeros([2, 3 + is_last])),
            "ExchangeError: ranks called different collectives",
            "rank 0 calls allreduce(float32[2, 3])",
            f"{last} allreduce(float32[2, 4])",
        ),
        (
            lambda: tfscale.allreduce(tf.zeros([2], tf.float64 if is_last else tf.float32)),
            "allreduce(float32[2])",
            f"{last} allreduce(float64[2])",
        ),
        (
            lambda: tfscale.allreduce(tf.zeros([2]), op=Max if is_last else Min),
            *("'MIN'", "'MAX'", last),
        ),
        (lambda: different(tf.zeros([2])), f"{last} allgather(float32[])"),
    ):
        require_error(call, *texts)
        total = tfscale.allreduce(tf.ones([2]), op=Sum)
        np.testing.assert_array_equal(total, [size] * 2)
    with pytest.raises(tf.errors.FailedPreconditionError, match="ranks called different"):
        different(tf.zeros([2]))  # as Horovod's
    total = tfscale.allreduce(tf.ones([2]), average=False)
    np.testing.assert_array_equal(total, [size] * 2)


def case_a_mean_of_sparse_rows_is_divided():
    # As Horovod's: by 3, not times 1 / 3, which differs in the last bit.
    for dtype in (tf.float16, tf.float32, tf.float64):
        own = tf.cast(np.random.default_rng(0).uniform(-100, 100, (500, 2)), dtype)
        first = 500 * rank
        rows = tfscale.allreduce(tf.IndexedSlices(own, tf.range(first, first + 500)))
        expected = tf.tile(own / tf.constant(size, dtype), [size, 1])
        np.testing.assert_array_equal(rows.values, expected)


def case_shapes_known_at_run_time():
    """They are compared first; cases_fuzz.py has other collectives."""

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float64)])
    def pair_and_gradient(x):
        pair = tfscale.grouped_allreduce([x, tf.ones([2], tf.float64)], op=Sum)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfscale.allgather(x, gradient="adjoint") ** 2
        return *pair, tape.gradient(y, x)

    for n_rows, width in ((4, 3), (0, 3), (4, 0), (7, 4000), (4, 3)):
        x = np.reshape(ramp(n_rows * width), [n_rows, width]).astype("float64")
        first, second, gradient = pair_and_gradient(x + rank)
        np.testing.assert_array_equal(first, size * x + rank_sum(size))
        np.testing.assert_array_equal(second, [size, size])
        np.testing.assert_array_equal(gradient, 2 * size * (x + rank))
