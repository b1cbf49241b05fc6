"""Compression of tensors: the dtype that is sent, or a number of bits per value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfscale.config import ConfigError, is_count, require

SMALLEST_QUANTIZED = 1024  # values of a variable


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


@dataclass(frozen=True)
class QuantizedCompressor(NoneCompressor):
    """Gradients of large kernels are sent in integers of few bits, with a scale for each block.

    What is rounded off is kept and added to the next gradient (error feedback), so nothing is lost
    over the steps. The first steps can be sent as bfloat16. Not compressed are variables of rank 1
    or less, such as biases and the parameters of BatchNormalization, variables of fewer than 1024
    values, sparse gradients, and what dense layers send instead of gradients: no later step would
    repair these.

    Attributes:
        bits: Bits per value.
        block: Values that share a scale.
        error_feedback: Whether what is rounded off is kept, in 4 bytes per value.
        start_step: Step from which on gradients have few bits. None begins after 5 % of the steps
            of `fit`, at least 500; without a tfscale callback, after 500.
    """

    bits: int
    block: int
    error_feedback: bool = True
    start_step: int | None = 0

    def __post_init__(self) -> None:
        fits = self.start_step is None or is_count(self.start_step, 0)
        require(fits, "start_step", "0 or more, or None", self.start_step)
        if self.bits < 8 and not self.error_feedback:
            raise ConfigError(
                f"Gradients of {self.bits} bits need error feedback: without it, training stops "
                "early. Received: error_feedback=False. Leave it out, or use Compression.int8."
            )

    def __call__(self, **options: Any) -> QuantizedCompressor:
        """Return a copy with other `error_feedback` or `start_step`."""
        unknown = sorted(set(options) - {"error_feedback", "start_step"})
        if unknown:
            raise ConfigError(
                "Compression.int8 and int4 take error_feedback and start_step. "
                f"Received: {', '.join(unknown)}."
            )
        return replace(self, **options)

    @property
    def wire_dtype(self) -> str:
        """The name of the integers, for plans."""
        return f"int{self.bits}"

    def fits(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Return whether gradients of a shape and dtype are quantised."""
        is_large = len(shape) > 1 and math.prod(shape) >= SMALLEST_QUANTIZED
        if is_large and dtype == "float64":
            raise ConfigError(
                f"Compression.{self.wire_dtype} is for float32. Received: a gradient of float64. "
                "Use Compression.bf16, or a float32 model."
            )
        return is_large and dtype == "float32"


class Compression:
    """Formats sent instead of float32: `none`, `fp16`, `bf16`, `int8` or `int4`.

    The 8 and 4 bits are for gradients of `DistributedOptimizer`; `Compression.int8` has options:
    `Compression.int8(error_feedback=False)`.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = QuantizedCompressor(bits=8, block=256)
    int4 = QuantizedCompressor(bits=4, block=64, start_step=None)


def refuse_quantized(compression: Any, where: str) -> None:
    """Raise a ConfigError for few bits where nothing keeps what is rounded off."""
    if isinstance(compression, QuantizedCompressor):
        raise ConfigError(
            "Sums of few bits need the residuals of earlier ones, which an optimizer with another "
            f"exchange than LocalSGD keeps. Received: Compression.{compression.wire_dtype} for "
            f"{where}. Use DistributedOptimizer, or Compression.bf16."
        )
