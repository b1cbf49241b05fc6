"""Layers of a model as the planner sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfscale.config import PlanError
from tfscale.files import sha256
from tfscale.plan.buckets import BYTES_PER_VALUE


@dataclass(frozen=True)
class Parameter:
    """One trainable variable.

    Attributes:
        name: Path, such as "dense/kernel".
        n_values: Number of its values.
        layer: Position of its layer in the table.
    """

    name: str
    n_values: int
    layer: int

    @property
    def n_bytes(self) -> int:
        """Bytes in float32, which is what travels."""
        return self.n_values * BYTES_PER_VALUE


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: Path.
        weights: (name, number of values) of each trainable variable.
        flops: Operations of its forward pass per sample; a multiplication and an addition are two.
        values: Values it writes in its forward pass per sample, activations included.
        dense: (n_in, n_out) of a dense layer's kernel, else None.
        rows: Rows per sample that a dense layer's kernel is multiplied with.
    """

    name: str
    weights: tuple[tuple[str, int], ...] = ()
    flops: float = 0.0
    values: int = 0
    dense: tuple[int, int] | None = None
    rows: int = 1

    @property
    def n_values(self) -> int:
        """Number of trainable values."""
        return sum(n for _, n in self.weights)


@dataclass(frozen=True)
class LayerTable:
    """A model: its layers in the order of the forward pass.

    Attributes:
        name: What messages call it, and under which measured times are found.
        layers: With and without parameters.
    """

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        """Check that there is something to train.

        Raises:
            PlanError: No layer has a parameter.
        """
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


def digest(*things: object) -> str:
    """Return 16 hexadecimal digits that depend on what the things' `repr` says."""
    return sha256(repr(things).encode())[:16]


def merge_small(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Add the work of layers without parameters to the layer before them.

    Args:
        layers: In the order of the forward pass.

    Returns:
        Fewer layers with the same parameters and work; faster to simulate.
    """
    merged: list[Layer] = []
    for layer in layers:
        if not merged or (layer.weights and merged[-1].weights):
            merged.append(layer)
            continue
        last = merged[-1]
        named = layer if layer.weights else last
        merged[-1] = Layer(
            named.name,
            named.weights,
            last.flops + layer.flops,
            last.values + layer.values,
            named.dense,
            named.rows,
        )
    return tuple(merged)


def is_partial_cheaper(n_in: int, n_out: int, global_batch: int, size: int) -> bool:
    """Return whether exchanging activations and errors moves fewer values than the gradient.

    A rank receives n_in / size columns of the activations and all columns of the errors of the
    whole batch, against its part of the gradients of all ranks; either is times
    (size - 1) / size without what the rank has itself.

    Args:
        n_in: Rows of the kernel.
        n_out: Its columns.
        global_batch: Samples of all ranks together, times positions for inputs of higher rank.
        size: Number of ranks.

    Source: [T] eq. 4.8: N_in K / n + N_out K < N_in N_out.
    """
    return size > 1 and n_in * global_batch + n_out * global_batch * size < n_in * n_out * size
