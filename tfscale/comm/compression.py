"""Dtypes on the wire."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class NoneCompressor:
    """Tensors are sent as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor and no context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Return the tensor."""
        return tensor


class _CastCompressor:
    wire = tf.float16

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return a float tensor in the wire's dtype, and its own dtype."""
        if not tensor.dtype.is_floating or tensor.dtype.size <= cls.wire.size:
            return tensor, None
        return tf.cast(tensor, cls.wire), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Return the tensor in its own dtype."""
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compressor(_CastCompressor):
    """Floats are sent as float16: range 6e-8 to 65504, 11 bits of precision.

    The ranks' values are added in float32 and the sum is rounded once.
    """


class BF16Compressor(_CastCompressor):
    """Floats are sent as bfloat16: the range of float32, 8 bits of precision."""

    wire = tf.bfloat16


class Compression:
    """Dtypes sent instead of float32 and float64: `none`, `fp16` or `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
