"""Sparse and compressed reductions."""

import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import in_both_modes, require_error
from tests.parallel.rank_values import plain, ramp, rank_sum
from tfscale import Average, Compression, Min, Sum

rank, size = tfscale.rank(), tfscale.size()  # only ranks import this


def slices_of_rank():
    """Rows 0 (twice) and rank + 1 of size + 2."""
    values = tf.constant([[1.0, rank], [2.0, 2.0], [3.0, 0.0]], tf.float64)
    return tf.IndexedSlices(
        values, tf.constant([0, rank + 1, 0], tf.int64), tf.constant([size + 2, 2])
    )


def sum_of_slices(size):
    total = np.full((size + 2, 2), 2.0)
    total[0] = [4.0 * size, rank_sum(size)]
    total[-1] = 0.0
    return total


def case_means_of_sparse_integers_are_those_of_their_sums():
    """Sparse means are float64, as Horovod's; dense ones are cut, once: not the ranks' shares."""
    value = tf.fill([1, 1], rank)
    own = tf.IndexedSlices(value, tf.constant([1]), tf.constant([2, 1]))
    mean = rank_sum(size) / size
    for as_dense, expected in ((False, mean), (True, int(mean))):
        for result in in_both_modes(
            lambda as_dense=as_dense: tf.convert_to_tensor(
                tfscale.allreduce(own, op=Average, sparse_as_dense=as_dense)
            )
        ):
            np.testing.assert_allclose(result.numpy(), [[0], [expected]], rtol=1e-15)


def case_group_of_sparse_and_dense_tensors():
    own = slices_of_rank()
    rows = tf.IndexedSlices(own.values, own.indices)

    def body():
        group = tfscale.grouped_allreduce([own, tf.ones([2]), rows], op=Sum)
        sums = [tf.math.unsorted_segment_sum(s.values, s.indices, size + 2) for s in group[::2]]
        assert group[2].dense_shape is None
        return tf.convert_to_tensor(group[0]), group[1], *sums

    for sparse, dense, *sums in in_both_modes(body):
        np.testing.assert_array_equal(dense, [size] * 2)
        for result in (sparse, *sums):
            np.testing.assert_array_equal(result, sum_of_slices(size))


def case_sparse():

    def reduced(op, **options):
        result = tfscale.allreduce(slices_of_rank(), op=op, **options)
        is_sparse = isinstance(result, tf.IndexedSlices)
        assert is_sparse != bool(options)
        if is_sparse and tf.executing_eagerly():  # rows come once
            np.testing.assert_array_equal(np.sort(result.indices), np.arange(size + 1))
        return tf.convert_to_tensor(result)

    for options in ({}, {"sparse_as_dense": True}):
        for result in in_both_modes(lambda options=options: reduced(Sum, **options)):
            np.testing.assert_array_equal(result.numpy(), sum_of_slices(size))
        for result in in_both_modes(lambda options=options: reduced(Average, **options)):
            np.testing.assert_allclose(result.numpy(), sum_of_slices(size) / size, rtol=1e-15)


def case_sparse_without_rows_on_one_rank():
    n_rows = 0 if rank == 0 else 1
    own = tf.IndexedSlices(tf.ones([n_rows, 2]), tf.fill([n_rows], rank), tf.constant([size, 2]))
    result = tf.convert_to_tensor(tfscale.allreduce(own, op=Sum))
    np.testing.assert_array_equal(result.numpy()[:, 0], [0.0] + [1.0] * (size - 1))


def case_sparse_has_no_minimum():
    require_error(lambda: tfscale.allreduce(slices_of_rank(), op=Min), "Received: op=Min")


@sizes(2, 3, 4)
def case_sparse_calls_that_differ_are_refused():
    """Factors, dense shapes, and a dense tensor on the last rank."""
    own = slices_of_rank()
    is_last, factor = rank == size - 1, 3.0 if rank == size - 1 else 1.0
    wide = tf.IndexedSlices(own.values, own.indices, tf.constant([size + 7, 2]))
    for action, *texts in (
        (
            lambda: tfscale.allreduce(own, op=Sum, prescale_factor=factor),
            "factors 1.0 and 1.0",
            "factors 3.0 and 1.0",
        ),
        (
            lambda: tfscale.allreduce(wide if is_last else own),
            f"dense shape [{size + 7}, 2]",
        ),
        (
            lambda: tfscale.allreduce(tf.convert_to_tensor(own) if is_last else own),
            "rank 0 calls sparse allreduce(float64[2])",
            f"rank {size - 1} calls allreduce(float64[{size + 2}, 2])",
        ),
    ):
        require_error(action, *texts)
        total = tf.convert_to_tensor(tfscale.allreduce(own, op=Sum))
        np.testing.assert_array_equal(total, sum_of_slices(size))


def case_sparse_averages_of_integers_do_not_overflow():
    for dtype, mean in ((tf.int32, tf.float64), (tf.int8, tf.float32)):
        values = tf.constant([[dtype.max], [dtype.max]], dtype)
        own = tf.IndexedSlices(values, tf.constant([1, 1]), tf.constant([3, 1]))
        for result in in_both_modes(tfscale.allreduce, own):
            assert result.dtype == mean
            dense = tf.convert_to_tensor(result)
            np.testing.assert_array_equal(dense, np.array([[0], [2.0 * dtype.max], [0]]))
        half = tfscale.allreduce(own, op=Sum, postscale_factor=0.5 / size)
        assert half.dtype == dtype
        assert half.indices.numpy().tolist() == [1] and half.values.numpy() == [[dtype.max]]


@sizes(2, 3)
def case_sparse_indices_of_several_dtypes_are_an_error_on_all():
    own = slices_of_rank()
    dtype = tf.int32 if rank == size - 1 else tf.int64
    slices = tf.IndexedSlices(own.values, tf.cast(own.indices, dtype), own.dense_shape)
    require_error(lambda: tfscale.allreduce(slices, op=Sum), "indices int32", "indices int64")
    total = tf.convert_to_tensor(tfscale.allreduce(own, op=Sum))  # the engine still works
    np.testing.assert_array_equal(total, sum_of_slices(size))


def case_sparse_with_a_dense_shape_known_at_run_time():
    own = slices_of_rank()

    @tf.function
    def reduced(dense_shape):
        slices = tf.IndexedSlices(own.values, own.indices, dense_shape)
        return tf.convert_to_tensor(tfscale.allreduce(slices, op=Sum))

    for dtype in (tf.int32, tf.int64):
        for _ in range(2):
            result = reduced(tf.cast(own.dense_shape, dtype)).numpy()
            np.testing.assert_array_equal(result, sum_of_slices(size))


def case_compression():
    for compression in (Compression.none, Compression.fp16, Compression.bf16):
        for dtype in (tf.float32, tf.float64, tf.bfloat16, tf.int64):
            own = tf.cast(ramp(100) + rank, dtype)
            for result in in_both_modes(
                lambda x, c=compression: tfscale.allreduce(x, op=Sum, compression=c), own
            ):
                assert result.dtype == dtype
                np.testing.assert_array_equal(
                    plain(result), size * ramp(100) + rank_sum(size), f"{compression} {dtype}"
                )


def case_compression_has_the_range_and_precision_of_the_wire():
    value = tf.constant([1e30, 1.0 + 2.0**-10])
    half = tfscale.allreduce(value, compression=Compression.fp16).numpy()
    brain = tfscale.allreduce(value, compression=Compression.bf16).numpy()
    assert np.isinf(half[0]) and half[1] == 1.0 + 2.0**-10
    assert abs(brain[0] - 1e30) < 1e28 and brain[1] == 1.0
    own = [tf.ones([3], tf.float64), tf.ones([2], tf.int32), tf.ones([1], tf.float32)]
    results = tfscale.grouped_allreduce(own, op=Sum, compression=Compression.bf16)
    assert [r.dtype for r in results] == [t.dtype for t in own]
    assert all((plain(r) == size).all() for r in results)
