"""Compression of tensors: the dtype that is sent, bits per value, or factors of low rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from tfscale.config import ConfigError, is_count, require

SMALLEST_COMPRESSED = 1024  # values of a variable that is sent in few bits
LARGEST_CHUNK = 4096  # of which 12 bits can name a value
_L = TypeVar("_L", bound="LossyCompressor")


class NoneCompressor:
    """Tensors are sent as they are."""

    wire: Any = None
    # Of changes of parameters that ranks gather: bits per value, values that share a scale.
    bits: int = 32
    block: int = 256

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
    bits = 16


class BF16Compressor(NoneCompressor):
    """Floats are sent as bfloat16: the range of float32, 8 bits of precision."""

    wire = tf.bfloat16
    bits = 16


@dataclass(frozen=True, kw_only=True)
class LossyCompressor(NoneCompressor):
    """Gradients of large kernels are sent in part; the rest is added to the next gradient.

    This is error feedback: nothing is lost over the steps. Not compressed are variables of rank 1
    or less, such as biases and the parameters of BatchNormalization, small variables, sparse
    gradients, and what dense layers send instead of gradients: no later step would repair these.

    Attributes:
        wire_dtype: Name of the format in plans.
        error_feedback: Whether the rest is kept, in 4 bytes per value.
        start_step: Step from which on gradients are compressed. None begins after 5 % of the steps
            of `fit`, at least 500; without a tfscale callback, after 500.
    """

    options: ClassVar[tuple[str, ...]] = ("error_feedback", "start_step")

    wire_dtype: str
    error_feedback: bool = True
    start_step: int | None = 0

    def __post_init__(self) -> None:
        fits = self.start_step is None or is_count(self.start_step, 0)
        require(fits, "start_step", "0 or more, or None", self.start_step)

    def __call__(self: _L, **options: Any) -> _L:
        """Return a copy with other `options`."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            raise ConfigError(
                f"Compression.{self.wire_dtype} takes {', '.join(self.options)}. "
                f"Received: {', '.join(unknown)}."
            )
        return replace(self, **options)

    def least_values(self, shape: tuple[int, ...]) -> float:
        """Return the number of values from which on a kernel is compressed."""
        return SMALLEST_COMPRESSED

    def fits(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Return whether gradients of a shape and dtype are compressed."""
        is_large = len(shape) > 1 and math.prod(shape) >= self.least_values(shape)
        if is_large and dtype == "float64":
            raise ConfigError(
                f"Compression.{self.wire_dtype} is for float32. Received: a gradient of float64. "
                "Use Compression.bf16, or a float32 model."
            )
        return is_large and dtype == "float32"


@dataclass(frozen=True, kw_only=True)
class QuantizedCompressor(LossyCompressor):
    """Kernels of 1024 values or more are sent in integers of few bits; the first steps as bfloat16.

    Attributes:
        bits: Bits per value.
        block: Values that share a scale.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits < 8 and not self.error_feedback:
            raise ConfigError(
                f"error_feedback must be True for {self.bits} bits: without it, training stops "
                "early. Received: error_feedback=False. Leave it out, or use Compression.int8."
            )


@dataclass(frozen=True, kw_only=True)
class LowRankCompressor(LossyCompressor):
    """Kernels are sent as the two factors of a matrix of low rank (PowerSGD).

    The matrix has shape [out, in]; that of a convolution [out, in * kernel height * kernel width].
    Factors of rank r have r * (out + in) values instead of out * in. Error feedback is always on,
    and gradients of the first steps are sent as they are.

    Attributes:
        rank: Columns of each factor.
        min_rate: Least ratio of both numbers of values; other kernels are sent as they are.

    Source: Vogels et al. (2019), PowerSGD, arXiv 1905.13727.
    """

    options: ClassVar[tuple[str, ...]] = ("rank", "start_step", "min_rate")

    wire_dtype: str = "low_rank"
    rank: int = 4
    start_step: int | None = 1000
    min_rate: float = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_count(self.rank, 1), "rank", "1 or more", self.rank)
        require(self.min_rate >= 1, "min_rate", "1 or more", self.min_rate)

    def second_factor(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the factor with a row for each input."""
        n_in = math.prod(shape[:-1])
        return n_in, min(self.rank, n_in, shape[-1])

    def least_values(self, shape: tuple[int, ...]) -> float:
        """Return the number of values from which on factors are small enough."""
        n_in, columns = self.second_factor(shape)
        return max(1, self.min_rate * columns * (n_in + shape[-1]))


@dataclass(frozen=True, kw_only=True)
class SparseCompressor(LossyCompressor):
    """The largest changes of each chunk of parameters are sent, in 14 bits each.

    It is for averages of `LocalSGD`, not for gradients. Variables below 1024 values are sent whole.
    A position has 12 bits, a value a sign and one of two levels: the means of the magnitudes up to
    their mean, and of those above it. A value below half of its level is not sent, so zero stays
    zero. Of equal magnitudes the first are sent. A chunk that is not finite becomes NaN on all
    ranks. What is not sent is added to the next change, multiplied by `decay`.

    Attributes:
        share: Share of each chunk's values that is sent, in (0, 1]; rounded up to a whole number.
        bits: Bits per value besides its position; 2.
        chunk: Values of which the largest are chosen, counted from each variable's beginning; 1 to
            4096. The last chunk of a variable may be shorter.
        decay: Factor in (0, 1] of what was not sent, in each average.

    Source: Sarfi et al.: Communication efficient LLM pre-training with SparseLoCo, 2025,
    arXiv 2508.15706.
    """

    options: ClassVar[tuple[str, ...]] = ("share", "bits", "chunk", "decay")

    wire_dtype: str = "sparse"
    share: float = 1 / 64
    bits: int = 2
    chunk: int = 4096
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.share <= 1, "share", "in (0, 1]", self.share)
        require(self.bits == 2, "bits", "2: a sign and one of two levels", self.bits)
        fits = is_count(self.chunk) and self.chunk <= LARGEST_CHUNK
        require(fits, "chunk", f"1 to {LARGEST_CHUNK}, for positions of 12 bits", self.chunk)
        require(0 < self.decay <= 1, "decay", "in (0, 1]", self.decay)

    def fits(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Return whether changes of a variable are sent in part: also vectors, if they are long."""
        flat = (1, math.prod(shape))
        return super().fits(flat, dtype)

    def n_bytes(self, count: int) -> int:
        """Return the bytes that a rank sends of `count` values of one variable."""

        def of_chunk(n: int) -> int:
            kept = math.ceil(self.share * n)
            return 4 + (3 * kept + 1) // 2 + -(-kept // 4) if n else 0

        whole, rest = divmod(count, self.chunk)
        return whole * of_chunk(self.chunk) + of_chunk(rest)


class Compression:
    """Formats sent instead of float32: `none`, `fp16`, `bf16`, `int8`, `int4`, `low_rank`, ...

    The last four are for `DistributedOptimizer`, and have options:
    `Compression.int8(error_feedback=False)`, `Compression.low_rank(rank=8)`. `sparse` is for
    averages of `LocalSGD` only, `low_rank` for gradients only.

    Examples:
        >>> tfscale.init()
        >>> bf16 = tfscale.Compression.bf16
        >>> optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=bf16)
        >>> tensor, dtype = bf16.compress(tf.constant([1.0, 1.001]))
        >>> tensor.dtype.name, bf16.decompress(tensor, dtype).numpy().tolist()
        ('bfloat16', [1.0, 1.0])
        >>> tfscale.Compression.low_rank(rank=8).rank
        8
        >>> tfscale.Compression.sparse(share=1 / 64).n_bytes(4096)  # instead of 16384
        116
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = QuantizedCompressor(wire_dtype="int8", bits=8, block=256)
    int4 = QuantizedCompressor(wire_dtype="int4", bits=4, block=64, start_step=None)
    low_rank = LowRankCompressor()
    sparse = SparseCompressor()


def refuse_low_rank(compression: Any, where: str) -> None:
    """Raise a ConfigError for factors of low rank where ranks do not sum whole gradients."""
    if isinstance(compression, LowRankCompressor):
        raise ConfigError(
            "Compression.low_rank needs whole gradients that every rank receives in each step. "
            f"Received: Compression.low_rank for {where}. Use DistributedOptimizer with "
            "exchange=tfscale.Allreduce() or tfscale.Chunked(), or Compression.bf16."
        )


def refuse_sparse(compression: Any, where: str) -> None:
    """Raise a ConfigError for shares of values where gradients are exchanged."""
    if isinstance(compression, SparseCompressor):
        raise ConfigError(
            "Compression.sparse is for averages of LocalSGD: of gradients, most would be applied "
            f"many steps late. Received: Compression.sparse for {where}. Use exchange="
            "tfscale.LocalSGD(...), or Compression.int8."
        )


def refuse_quantized(compression: Any, where: str) -> None:
    """Raise a ConfigError for few bits where nothing keeps what is rounded off."""
    refuse_low_rank(compression, where)
    refuse_sparse(compression, where)
    if isinstance(compression, QuantizedCompressor):
        raise ConfigError(
            f"Compression.{compression.wire_dtype} needs residuals that an optimizer keeps. "
            f"Received: Compression.{compression.wire_dtype} for {where}. Use "
            "DistributedOptimizer without these options, or Compression.bf16."
        )
