"""Layers of a model as the planner sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfscale.config import PlanError
from tfscale.plan.buckets import BYTES_PER_VALUE


@dataclass(frozen=True)
class Parameter:
    """One trainable variable: its path, number of values, and position of its layer."""

    name: str
    n_values: int
    layer: int

    @property
    def n_bytes(self) -> int:
        """Bytes in float32, in which it is sent."""
        return self.n_values * BYTES_PER_VALUE


@dataclass(frozen=True)
class Layer:
    """One layer; operations and values are per sample, of the forward pass."""

    name: str  # path
    weights: tuple[tuple[str, int], ...] = ()  # name and number of values of each variable
    flops: float = 0.0  # a multiplication and an addition are two
    values: int = 0  # values it writes, activations included
    dense: tuple[int, int] | None = None  # (n_in, n_out) of a dense layer's kernel
    rows: int = 1  # that a dense layer's kernel is multiplied with

    @property
    def n_values(self) -> int:
        """Number of trainable values."""
        return sum(n for _, n in self.weights)


@dataclass(frozen=True)
class LayerTable:
    """A model: its layers, with and without parameters, in the order of the forward pass.

    Measured times are found by its name.
    """

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        """Require a layer with parameters; raises PlanError."""
        if not any(layer.weights for layer in self.layers):
            raise PlanError(
                f"A model must have trainable variables. Received: {self.name} with none. "
                "Build the model first."
            )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All trainable variables, in the order of the model."""
        return tuple(
            Parameter(name, n, place)
            for place, layer in enumerate(self.layers)
            for name, n in layer.weights
        )

    @property
    def n_values(self) -> int:
        """Number of trainable values."""
        return sum(layer.n_values for layer in self.layers)

    def positions(self, place: int) -> tuple[int, ...]:
        """Return the positions of one layer's variables among `parameters`."""
        return tuple(i for i, p in enumerate(self.parameters) if p.layer == place)


def merge_small(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Add the work of layers without parameters to the layer before them: faster to simulate."""
    merged: list[Layer] = []
    for layer in layers:
        if not merged or (layer.weights and merged[-1].weights):
            merged.append(layer)
            continue
        last = merged[-1]
        named = layer if layer.weights else last
        merged[-1] = replace(
            named, flops=last.flops + layer.flops, values=last.values + layer.values
        )
    return tuple(merged)


def is_replicated_cheaper(n_in: int, n_out: int, global_batch: int, size: int) -> bool:
    """Return whether gathering activations and output gradients moves less than an allreduce.

    Per rank (size - 1) / size * (n_in + n_out) * global_batch values are received against
    2 * (size - 1) / size * n_in * n_out. Every rank then computes the gradient of the whole
    batch, so it must move half of the allreduce's values at most.

    Args:
        n_in: Rows of the kernel.
        n_out: Its columns.
        global_batch: Samples of all ranks together, times positions for inputs of higher rank.
        size: Number of ranks.

    Source: [T] 3.2: (N_in + N_out) * K instead of N_in * N_out.
    """
    return size > 1 and (n_in + n_out) * global_batch < n_in * n_out


def is_partial_cheaper(n_in: int, n_out: int, global_batch: int, size: int) -> bool:
    """Return whether sending activations and output gradients moves less than the gradient.

    A rank receives n_in / size columns of the activations and all columns of the output gradients
    of the whole batch, against its part of the gradients of all ranks; either is times
    (size - 1) / size without what the rank has itself. Arguments: see `is_replicated_cheaper`.

    Source: [T] eq. 4.8: N_in K / n + N_out K < N_in N_out.
    """
    return size > 1 and n_in * global_batch + n_out * global_batch * size < n_in * n_out * size
