"""Numbers as Horovod takes them: types, factors and NaN."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.backends.base import ReduceOp

# What its data ops take; other types travel as bytes.
_MOVABLE = (
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.float32, tf.float64, tf.bool),
)


def widen(tensor: tf.Tensor) -> tf.Tensor:
    """Return 16-bit floats as float32: Horovod knows no bfloat16 and rounds each partial sum."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size == 2 else tensor


def scale(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Return factor * tensor; integers are divided if it is 1 / n, else multiplied and cut."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating:
        return tensor * tf.constant(factor, tensor.dtype)
    divisor = round(1.0 / factor) if factor else 0
    if divisor and abs(divisor * factor - 1.0) < 1e-12:
        return tf.truncatediv(tensor, tf.constant(divisor, tensor.dtype))
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def nan_flag(tensor: tf.Tensor, op: ReduceOp) -> tf.Tensor:
    """Return a number per element that stays visible in the extreme if any rank has NaN there.

    The libraries below Horovod differ in what the extreme of NaN and a number is.
    """
    if not tensor.dtype.is_floating:
        return tf.zeros([1], tensor.dtype)
    is_nan = tf.cast(tf.math.is_nan(tensor), tensor.dtype)
    return is_nan if op is ReduceOp.MAX else -is_nan


def restore_nan(value: tf.Tensor, flag: tf.Tensor) -> tf.Tensor:
    """Put NaN where a rank had it, see `nan_flag`."""
    if not value.dtype.is_floating:
        return value
    return tf.where(flag != 0, tf.constant(float("nan"), value.dtype), value)


def to_wire(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor as Horovod can move it: of a type it knows, or as bytes."""
    return tensor if tensor.dtype in _MOVABLE else tf.bitcast(tensor, tf.uint8)


def from_wire(moved: tf.Tensor, like: tf.Tensor, rows: Any) -> tf.Tensor:
    """Return what moved in the type of `like`, and its shape but for the number of rows."""
    value = moved if like.dtype in _MOVABLE else tf.bitcast(moved, like.dtype)
    return tf.ensure_shape(value, tf.TensorShape(rows).concatenate(like.shape[1:]))


def checked_splits(splits: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Return splits as Horovod takes them; it would leave rows behind that no split names."""
    counts = tf.cast(splits, tf.int32)
    text = "splits must be 0 or more and add up to the tensor's rows. Received: splits, rows"
    rows = tf.shape(tensor)[0]
    is_right = tf.reduce_all(counts >= 0) & (tf.reduce_sum(counts) == rows)
    with tf.control_dependencies([tf.debugging.Assert(is_right, [text, counts, rows])]):
        return tf.identity(counts)
