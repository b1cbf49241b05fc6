"""The reductions users name, and what they mean to the engine."""

from __future__ import annotations

import tensorflow as tf

from tfscale.backends.base import ReduceOp, Scaling
from tfscale.errors import ConfigError

Average = "Average"
Sum = "Sum"
Min = "Min"
Max = "Max"
Product = "Product"

_ENGINE_OPS = {
    Average: ReduceOp.SUM,
    Sum: ReduceOp.SUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}
REDUCIBLE = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)


def engine_op(op: str) -> ReduceOp:
    """Return the engine's reduction; an average is a sum with a factor.

    Raises:
        ConfigError: The reduction is unknown.
    """
    if op not in _ENGINE_OPS:
        raise ConfigError(f"op must be one of {', '.join(_ENGINE_OPS)}. Received: op={op!r}.")
    return _ENGINE_OPS[op]


def scaling_of(op: str, factors: Scaling, size: int, tensors: list[tf.Tensor]) -> Scaling:
    """Return the factors around the engine's reduction.

    Args:
        op: Reduction as users name it.
        factors: What the user multiplies before and after.
        size: Number of ranks.
        tensors: Inputs, for their dtypes.

    Returns:
        `factors`, with the mean's division in the second one.

    Raises:
        ConfigError: A dtype cannot be reduced.
    """
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE:
            raise ConfigError(
                "A reduction needs float32, float64, float16, bfloat16, int32 or int64. "
                f"Received: dtype={tensor.dtype.name}. Cast the tensor first."
            )
    if op == Average:
        return Scaling(factors.prescale, factors.postscale / size)
    return factors
