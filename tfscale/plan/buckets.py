"""Gradients and the buckets that they are exchanged in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfscale.config import PlanError

BYTES_PER_VALUE = 4  # of float32, which gradients and parameters travel as unless compressed

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class GradientSpec:
    """One dense gradient.

    Attributes:
        name: Path of the variable, such as "dense/kernel".
        shape: Its shape.
        dtype: Name of the dtype that travels.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return _BYTES[self.dtype]

    @property
    def n_bytes(self) -> int:
        """Bytes on the wire, before any collective's own factor."""
        return math.prod(self.shape) * self.item_bytes


# With "auto" a model is cut into this many buckets: enough that most of the exchange hides behind
# back-propagation, few enough that latency stays small beside it.
_AUTO_BUCKETS = 8
_AUTO_LEAST = 256 * 1024
_AUTO_MOST = 16 * 1024 * 1024


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged as one message.

    Attributes:
        indices: Positions in the sequence of specs, in the order they become ready.
        dtype: What travels; one per bucket.
        n_bytes: Sum over its gradients.
    """

    indices: tuple[int, ...]
    dtype: str
    n_bytes: int


def auto_bucket_bytes(specs: Sequence[GradientSpec]) -> int:
    """Return the bucket size for a model whose user chose none, in bytes."""
    total = sum(spec.n_bytes for spec in specs)
    return min(_AUTO_MOST, max(_AUTO_LEAST, total // _AUTO_BUCKETS))


def build_buckets(specs: Sequence[GradientSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Group gradients into buckets.

    Args:
        specs: One per variable, in the order of the model, so that the last is ready first.
        bucket_bytes: Upper bound of a bucket in bytes; 0 puts each gradient into its own.

    Returns:
        Buckets in the order in which they become ready: each spec in exactly one, neighbours
        together, one dtype each, and within `bucket_bytes` unless it holds a single gradient.

    Raises:
        PlanError: `bucket_bytes` is negative.
    """
    if bucket_bytes < 0:
        raise PlanError(f"bucket_bytes must be 0 or more. Received: bucket_bytes={bucket_bytes}.")
    open_buckets: dict[str, list[int]] = {}
    closed: list[Bucket] = []

    def close(dtype: str) -> None:
        indices = open_buckets.pop(dtype)
        closed.append(Bucket(tuple(indices), dtype, sum(specs[i].n_bytes for i in indices)))

    for index in reversed(range(len(specs))):
        spec = specs[index]
        members = open_buckets.get(spec.dtype, [])
        filled = sum(specs[i].n_bytes for i in members)
        if members and filled + spec.n_bytes > bucket_bytes:
            close(spec.dtype)
        open_buckets.setdefault(spec.dtype, []).append(index)
    for dtype in list(open_buckets):
        close(dtype)
    return tuple(sorted(closed, key=lambda bucket: min(bucket.indices), reverse=True))


def group_buckets(
    specs: Sequence[GradientSpec], groups: Sequence[Sequence[int]]
) -> tuple[Bucket, ...]:
    """Turn groups chosen by the user into buckets.

    Args:
        specs: One per variable.
        groups: Positions that belong together. Those in no group travel alone; a group of several
            dtypes is cut by dtype.

    Returns:
        Buckets in the order in which they become ready; each spec in exactly one.

    Raises:
        PlanError: A position is in two groups.
    """
    chosen = [index for group in groups for index in group]
    if len(set(chosen)) < len(chosen):
        raise PlanError("A variable must be in one group only. Received: groups that overlap.")
    alone = [[i] for i in range(len(specs)) if i not in set(chosen)]
    buckets = []
    for group in [*map(list, groups), *alone]:
        for dtype in dict.fromkeys(specs[i].dtype for i in group):
            indices = sorted((i for i in group if specs[i].dtype == dtype), reverse=True)
            n_bytes = sum(specs[i].n_bytes for i in indices)
            buckets.append(Bucket(tuple(indices), dtype, n_bytes))
    return tuple(sorted(buckets, key=lambda bucket: min(bucket.indices), reverse=True))
