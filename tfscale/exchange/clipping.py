"""Clipping of gradients of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, ReduceOp, Scaling
from tfscale.exchange.shards import Shards


def clip(
    rule: Any, gradients: Sequence[Any], positions: Sequence[int], shards: Shards
) -> list[tf.Tensor]:
    """Return gradients clipped as Keras does it, by the norms of whole variables.

    Args:
        rule: The Keras optimizer whose clipnorm, global_clipnorm or clipvalue holds.
        gradients: Of pieces or of whole variables; no None.
        positions: Which of the shards' variables each belongs to; -1 for one that is not shared.
        shards: Who holds the other parts.

    Raises:
        ExchangeError: Communication failed.
    """
    dense = [tf.convert_to_tensor(g) for g in gradients]
    if rule.clipnorm and rule.clipnorm > 0:
        norms = [tf.sqrt(square) for square in _squares(dense, positions, shards)]
        limit = rule.clipnorm
        return [g * limit / tf.maximum(n, limit) for g, n in zip(dense, norms, strict=True)]
    if rule.global_clipnorm and rule.global_clipnorm > 0:
        return _clip_globally(rule.global_clipnorm, dense, positions, shards)
    if rule.clipvalue and rule.clipvalue > 0:
        return [tf.clip_by_value(g, -rule.clipvalue, rule.clipvalue) for g in dense]
    return dense


def _clip_globally(
    limit: float, gradients: list[tf.Tensor], positions: Sequence[int], shards: Shards
) -> list[tf.Tensor]:
    dtype = gradients[0].dtype
    squares = [tf.cast(tf.reduce_sum(g * g), dtype) for g in gradients]
    shared = [s for s, p in zip(squares, positions, strict=True) if p >= 0]
    local = [s for s, p in zip(squares, positions, strict=True) if p < 0]
    total = _sum_over_ranks(_sum(shared, dtype), shards)
    norm = tf.sqrt(total + _sum(local, dtype))
    # An infinite norm makes all gradients NaN, as in Keras.
    scale = limit * tf.minimum(1 / norm, tf.constant(1 / limit, norm.dtype)) + (norm - norm)
    return [g * tf.cast(scale, g.dtype) for g in gradients]


def _sum(scalars: list[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    # Not add_n: in a branch TensorFlow's memory optimizer makes of it what fails when it runs.
    return tf.reduce_sum(tf.stack([tf.zeros([], dtype), *scalars]))


def _squares(
    gradients: list[tf.Tensor], positions: Sequence[int], shards: Shards
) -> list[tf.Tensor]:
    """Return the sum of squares of each gradient's whole variable."""
    own = [tf.reduce_sum(g * g) for g in gradients]
    dtype = own[0].dtype
    parts = {p: s for p, s in zip(positions, own, strict=True) if p >= 0}
    vector = [
        tf.cast(parts[i], dtype) if i in parts else tf.zeros([], dtype)
        for i in range(len(shards.variables))
    ]
    sums = _sum_over_ranks(tf.stack(vector), shards)
    return [tf.cast(sums[p], s.dtype) if p >= 0 else s for p, s in zip(positions, own, strict=True)]


def _sum_over_ranks(values: tf.Tensor, shards: Shards) -> tf.Tensor:
    call = Call(shards.group, "norms of gradients")
    (total,) = runtime.backend().allreduce([values], call, ReduceOp.SUM, Scaling())
    return total
