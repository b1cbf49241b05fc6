"""The op that merges an average in one pass equals TensorFlow's ops."""

import numpy as np
import pytest
import tensorflow as tf

from tfscale.comm.backends import engine
from tfscale.comm.backends.base import SingleBackend

SHAPES = ((3, 5), (), (0, 4), (9001,), (16,))
SIZE = 3 * 5 + 1 + 0 + 9001 + 16


def drawn(dtype, *shapes):
    random = np.random.default_rng(len(shapes))
    return [tf.cast(random.normal(size=shape), dtype) for shape in shapes]


def variables_of(dtype):
    return [tf.Variable(value) for value in drawn(dtype, *SHAPES)]


def merge(variables, vectors, weight):
    merge_op = engine.load().ops.tfscale_merge
    return merge_op(variables=[v.handle for v in variables], vectors=vectors, weight=repr(weight))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_merge_equals_tensorflow(dtype, weight):
    vectors = drawn(dtype, *[SIZE] * 4)
    own, known = variables_of(dtype), variables_of(dtype)
    squares = merge(own, vectors, weight)
    wanted = SingleBackend().merge(known, vectors, weight)
    for variable, other in zip(own, known, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())
    tolerance = 1e-12 if dtype is tf.float64 else 1e-5
    np.testing.assert_allclose(squares, wanted, rtol=tolerance)
    assert np.array_equal(squares, merge(variables_of(dtype), vectors, weight))  # bits, too


def test_a_value_read_before_stays():
    first, second, new = drawn(tf.float32, *[SIZE] * 3)
    variables = variables_of(tf.float32)
    before = [v.read_value() for v in variables]
    kept = [value.numpy() for value in before]
    merge(variables, [first, second, new, new], 0.0)
    for value, known in zip(before, kept, strict=True):
        np.testing.assert_array_equal(value, known)
    np.testing.assert_array_equal(tf.concat([tf.reshape(v, [-1]) for v in variables], 0), new)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_vectors_have_the_variables_elements(size):
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many elements"):
        merge(variables_of(tf.float32), [tf.zeros([size])] * 4, 1.0)
