"""Means of tensors over a group of ranks, as part of a traced step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Scaling
from tfscale.comm.compression import Compression


def mean_over(
    group: Group, values: Sequence[tf.Tensor], what: str, compression: Any = Compression.none
) -> list[tf.Tensor]:
    """Return the means of tensors over a group. Collective.

    Args:
        group: Of ranks that have the same shapes and dtypes.
        values: Values of one dtype travel together.
        what: Shown in reports.
        compression: What travels of them, see `Compression`.
    """
    call = Call(group, f"average of {what}")
    packed = [compression.compress(value) for value in values]
    means: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(p.dtype for p, _ in packed):
        places = [i for i, (p, _) in enumerate(packed) if p.dtype == dtype]
        own = [packed[i][0] for i in places]
        some = runtime.backend().allreduce(own, call, ReduceOp.SUM, Scaling(1.0, 1.0 / group.size))
        means.update(zip(places, some, strict=True))
    return [compression.decompress(means[i], context) for i, (_, context) in enumerate(packed)]
