"""Buckets and chunks of gradients that are sent together, in the order of back-propagation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tfscale.config import PlanError

BYTES_PER_VALUE = 4  # of float32, the dtype on the wire without compression

_BITS = {"int4": 4, "int8": 8, "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
_BITS |= {"int32": 32, "int64": 64}
# Factors count as their gradients: they are ready together with these.
_BITS["low_rank"] = 32

# With "auto" a model is cut into this many buckets: enough that most of the exchange overlaps with
# back-propagation, few enough that latency adds little. A small model has fewer: where all cores
# compute, each message costs more than what it overlaps with (docs/architecture.md).
_AUTO_BUCKETS = 8
_AUTO_LEAST = 1024 * 1024
_AUTO_MOST = 16 * 1024 * 1024
# Of several buckets, the last ones need not be smaller than this.
_TAIL_LEAST = 256 * 1024
# One message is one op with an output for each tensor, and TensorFlow infers the shapes of all
# outputs again for each: with 1,000 tensors that alone takes 50 s (grappler's tfg_optimizer).
_MOST_TENSORS = 128


# How the gradient of a variable is exchanged.
# "none": there is none in this step. "weights": each rank has that of its samples, and sends it; a
# plan says more: "allreduce" sums it everywhere, "sharded" gives each rank the sum of its segment,
# and the parameters are gathered after the update. "rows": the same with some rows only.
# "replicated", "partial": ranks exchange a dense layer's activations and output gradients; each
# computes the gradient of the whole batch, all of it or that of its own rows.
Kind = Literal["none", "weights", "allreduce", "sharded", "rows", "replicated", "partial"]


@dataclass(frozen=True)
class GradientSpec:
    """A dense gradient: path of its variable, such as "dense/kernel", shape, dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one value, for dtypes of variables."""
        return _BITS[self.dtype] // 8

    @property
    def n_bytes(self) -> int:
        """Bytes of the gradient; the bytes that a collective sends depend on its algorithm."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8


# Positions of gradients of one dtype that are sent as one message, the first ready one first.
Bucket = tuple[int, ...]


def auto_bucket_bytes(specs: Sequence[GradientSpec]) -> int:
    """Return the default bucket size of a model in bytes."""
    total = sum(spec.n_bytes for spec in specs)
    return min(_AUTO_MOST, max(_AUTO_LEAST, total // _AUTO_BUCKETS))


def build_buckets(specs: Sequence[GradientSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Group gradients into buckets, in the order in which they become ready.

    Where there are several, the last ones are smaller: a bucket has half of the bytes that are
    still to come at most. Back-propagation has ended when the last one is sent, and the next step
    cannot begin before its parameters have come.

    Args:
        specs: One per variable, in the order of the model, so that the last is ready first.
        bucket_bytes: Upper bound of a bucket in bytes, unless it has a single gradient; 0 gives
            each gradient its own bucket.
    """
    if bucket_bytes < 0:
        raise PlanError(f"bucket_bytes must be 0 or more. Received: bucket_bytes={bucket_bytes}.")
    groups: list[list[int]] = []
    last: dict[str, list[int]] = {}  # the open group of each dtype
    room: dict[str, int] = {}  # the bytes that it may still take
    to_come = sum(spec.n_bytes for spec in specs)
    tail_bytes = _TAIL_LEAST if to_come > 2 * bucket_bytes else bucket_bytes
    for index in reversed(range(len(specs))):
        dtype, n_bytes = specs[index].dtype, specs[index].n_bytes
        if dtype not in last or n_bytes > room[dtype]:
            last[dtype] = []
            room[dtype] = min(bucket_bytes, max(tail_bytes, to_come // 2))
            groups.append(last[dtype])
        last[dtype].append(index)
        room[dtype] -= n_bytes
        to_come -= n_bytes
    return group_buckets(specs, groups)


def group_buckets(
    specs: Sequence[GradientSpec], groups: Sequence[Sequence[int]]
) -> tuple[Bucket, ...]:
    """Turn groups of positions in `specs` into buckets, in the order in which they become ready.

    Each spec is in exactly one bucket: gradients in no group are sent alone, and a group of several
    dtypes is split by dtype, one of more than 128 tensors by their number. Groups that overlap are
    a PlanError.
    """
    chosen = {index for group in groups for index in group}
    if len(chosen) < sum(map(len, groups)):
        raise PlanError("groups must not share a variable. Received: two that do.")
    alone = [[i] for i in range(len(specs)) if i not in chosen]
    buckets: list[Bucket] = []
    for group in [*map(list, groups), *alone]:
        for dtype in {specs[i].dtype for i in group}:
            places = sorted((i for i in group if specs[i].dtype == dtype), reverse=True)
            cuts = range(0, len(places), _MOST_TENSORS)
            buckets.extend(tuple(places[cut : cut + _MOST_TENSORS]) for cut in cuts)
    return tuple(sorted(buckets, key=min, reverse=True))


def owner_of(name: str) -> str:
    """Return the path of the layer that owns a variable, such as "block/dense"."""
    return name.rpartition("/")[0] or name


def layers_of(names: Sequence[str]) -> list[list[int]]:
    """Group positions of variables by layer, layers in the order of their first variable."""
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        layers.setdefault(owner_of(name), []).append(position)
    return list(layers.values())


def chunk_layers(
    layer_bytes: Sequence[int], first_chunk_layers: int, chunks: int | Literal["per_layer"]
) -> list[list[int]]:
    """Cut a model into chunks of layers, [T] chapter 3, algorithm 2.

    `layer_bytes` are those of each layer's gradients, in the order of the model. The first chunk
    has the last `first_chunk_layers` layers; the others are divided so that the remaining chunks
    have about equally many bytes. Chunks are in the order of readiness; none is empty.
    """
    backwards = list(reversed(range(len(layer_bytes))))
    if chunks == "per_layer":
        return [[layer] for layer in backwards]
    if chunks < 1 or first_chunk_layers < 1:
        raise PlanError(
            f"chunks need a layer. Received: first_chunk_layers={first_chunk_layers}, "
            f"chunks={chunks}."
        )
    if chunks == 1:
        return [backwards] if backwards else []
    result = [backwards[:first_chunk_layers]]
    rest = backwards[first_chunk_layers:]
    target = sum(layer_bytes[layer] for layer in rest) / (chunks - 1)
    part: list[int] = []
    filled = 0
    for layer in rest:
        part.append(layer)
        filled += layer_bytes[layer]
        if filled >= target * len(result) and len(result) < chunks - 1:
            result.append(part)
            part = []
    return [chunk for chunk in [*result, part] if chunk]


def build_chunks(
    specs: Sequence[GradientSpec], first_chunk_layers: int, chunks: int | Literal["per_layer"]
) -> tuple[Bucket, ...]:
    """Group gradients into one bucket per chunk and dtype; see `chunk_layers`."""
    layers = layers_of([spec.name for spec in specs])
    layer_bytes = [sum(specs[i].n_bytes for i in layer) for layer in layers]
    cut = chunk_layers(layer_bytes, first_chunk_layers, chunks)
    return group_buckets(specs, [[i for layer in chunk for i in layers[layer]] for chunk in cut])
