"""Chunks of layers: which layers' gradients travel together, and when.

Source: [T] chapter 3, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tfscale.config import PlanError
from tfscale.plan.buckets import Bucket, GradientSpec, group_buckets


def layers_of(names: Sequence[str]) -> list[list[int]]:
    """Group variables by the layer that owns them.

    Args:
        names: Paths of variables, such as "block/dense/kernel", in the order of the model.

    Returns:
        Positions per layer, layers in the order of their first variable.
    """
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        layers.setdefault(owner_of(name), []).append(position)
    return list(layers.values())


def owner_of(name: str) -> str:
    """Return the path of the layer that owns a variable."""
    return name.rpartition("/")[0] or name


def chunk_layers(
    layer_bytes: Sequence[int], first_chunk_layers: int, chunks: int | Literal["per_layer"]
) -> list[list[int]]:
    """Cut a model into chunks of layers.

    Args:
        layer_bytes: Bytes of each layer's gradients, in the order of the model.
        first_chunk_layers: Layers in the first chunk, counted from the last layer; more than
            there are put all into one chunk.
        chunks: How many chunks, 1 or more; "per_layer" makes one of each layer.

    Returns:
        Layers per chunk, chunks in the order in which they become ready; the layers after the
        first chunk are shared among the others so that these hold about equally many bytes.
        Each layer is in exactly one chunk, and no chunk is empty.

    Raises:
        PlanError: A number is not positive.
    """
    backwards = list(reversed(range(len(layer_bytes))))
    if chunks == "per_layer":
        return [[layer] for layer in backwards]
    if chunks < 1 or first_chunk_layers < 1:
        raise PlanError(
            "A chunk needs a layer. Received: "
            f"first_chunk_layers={first_chunk_layers}, chunks={chunks}."
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
    groups = [
        [i for layer in chunk for i in layers[layer]]
        for chunk in chunk_layers(layer_bytes, first_chunk_layers, chunks)
    ]
    return group_buckets(specs, groups)


def is_replicated_cheaper(n_in: int, n_out: int, global_batch: int, size: int) -> bool:
    """Return whether gathering activations and errors moves fewer values than an allreduce.

    Per rank (size - 1) / size * (n_in + n_out) * global_batch values are received against
    2 * (size - 1) / size * n_in * n_out. Every rank then computes the gradient of the whole
    batch, so it must move half of the allreduce's values at most.

    Args:
        n_in: Inputs of the dense layer.
        n_out: Its outputs.
        global_batch: Samples of all ranks together, times positions for inputs of higher rank.
        size: Number of ranks.

    Source: [T] 3.2: (N_in + N_out) * K instead of N_in * N_out.
    """
    return size > 1 and (n_in + n_out) * global_batch < n_in * n_out
