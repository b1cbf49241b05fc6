"""Compression of tensors: the dtype that is sent."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class NoneCompressor:
    """Tensors are sent as they are."""

    wire: Any = None

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor to send and its own dtype, or None where it is not converted."""
        is_wide = tensor.dtype.is_floating and cls.wire and tensor.dtype.size > cls.wire.size
        return (tf.cast(tensor, cls.wire), tensor.dtype) if is_wide else (tensor, None)

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Return the tensor in its own dtype."""
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compressor(NoneCompressor):
    """Floats are sent as float16: range 6e-8 to 65504, 11 bits of precision.

    The ranks' values are added in float32 and the sum is rounded once.
    """

    wire = tf.float16


class BF16Compressor(NoneCompressor):
    """Floats are sent as bfloat16: the range of float32, 8 bits of precision."""

    wire = tf.bfloat16


class Compression:
    """Dtypes sent instead of float32 and float64: `none`, `fp16` or `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
