"""Layer tables: parameters, operations and values of a model's layers, for the planner."""

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
        """Bytes as float32."""
        return self.n_values * BYTES_PER_VALUE


@dataclass(frozen=True)
class Layer:
    """One layer; `flops` and `values` are per sample, in the forward pass."""

    name: str  # path
    weights: tuple[tuple[str, int], ...] = ()  # name and number of values of each variable
    flops: float = 0.0  # a multiplication and an addition are two
    values: int = 0  # number of values that it writes, including activations
    dense: tuple[int, int] | None = None  # (n_in, n_out) of a dense layer's kernel
    rows: int = 1  # rows per sample that a dense layer's kernel is multiplied with

    @property
    def n_values(self) -> int:
        """Number of trainable values."""
        return sum(n for _, n in self.weights)


@dataclass(frozen=True)
class LayerTable:
    """A model: its layers, with and without parameters, in the order of the forward pass.

    `name` is the key of its measured times in `Machine.layer_times`.
    """

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not any(layer.weights for layer in self.layers):
            raise PlanError(
                f"model must have trainable variables. Received: {self.name} with none. Build "
                "the model first."
            )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All trainable variables, in the order of the model."""
        return tuple(
            Parameter(name, n, index)
            for index, layer in enumerate(self.layers)
            for name, n in layer.weights
        )

    @property
    def n_values(self) -> int:
        """Number of trainable values."""
        return sum(layer.n_values for layer in self.layers)

    def positions(self, layer_index: int) -> tuple[int, ...]:
        """Return the positions of one layer's variables among `parameters`."""
        return tuple(i for i, p in enumerate(self.parameters) if p.layer == layer_index)


def merge_small(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Merge layers without parameters into their neighbours, for a faster simulation."""
    merged: list[Layer] = []
    for layer in layers:
        if not merged or (layer.weights and merged[-1].weights):
            merged.append(layer)
            continue
        last = merged.pop()
        flops, values = last.flops + layer.flops, last.values + layer.values
        merged.append(replace(layer if layer.weights else last, flops=flops, values=values))
    return tuple(merged)


def is_replicated_cheaper(n_in: int, n_out: int, global_batch: int, size: int) -> bool:
    """Return whether gathering activations and output gradients moves less than an allreduce.

    A rank receives (size - 1) / size * (n_in + n_out) * global_batch values instead of
    2 * (size - 1) / size * n_in * n_out. As every rank then computes the gradient of the whole
    batch, "less" means less than half of the allreduce's values. `global_batch` are the samples of
    all ranks together, times positions for inputs of higher rank.

    Source: [T] 3.2: (N_in + N_out) * K instead of N_in * N_out.
    """
    return size > 1 and (n_in + n_out) * global_batch < n_in * n_out


def is_partial_cheaper(n_in: int, n_out: int, global_batch: int, size: int) -> bool:
    """Return whether sending activations and output gradients moves less than weight gradients.

    A rank receives (size - 1) / size * (n_in / size + n_out) * global_batch values (activations for
    its rows of the kernel, all output gradients) instead of (size - 1) / size * n_in * n_out.
    Arguments: see `is_replicated_cheaper`.

    Source: [T] eq. 4.8: N_in K / n + N_out K < N_in N_out.
    """
    return size > 1 and n_in * global_batch + n_out * global_batch * size < n_in * n_out * size
