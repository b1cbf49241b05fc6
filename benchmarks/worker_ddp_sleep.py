"""PyTorch's models whose layers sleep, as `benchmarks.sleeping` makes those of TensorFlow.

Imports nothing of TensorFlow's. Dense layers exchange weights here, so that each layer has one
time forward and one backward.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import layer_tables
from benchmarks.places import SLOW_MOTION

_PARTS = 8  # as many as tfscale's "auto" makes buckets
_FACTOR = float(os.environ.get(SLOW_MOTION, "1"))
_free_at = 0.0  # when the core of this process has done all that was begun


def sleep(seconds: float) -> None:
    """Sleep on this process's core; a late wake-up makes the next sleep shorter."""
    global _free_at
    _free_at = max(_free_at, time.perf_counter()) + seconds * _FACTOR
    time.sleep(max(0.0, _free_at - time.perf_counter()))


class _Nap(torch.autograd.Function):
    """Sleeps forward and backward; gradients have small values that are made once."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, layer: Nap, *weights: torch.Tensor) -> torch.Tensor:
        context.layer, context.shapes = layer, [weight.shape for weight in weights]
        sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, of_outputs: torch.Tensor) -> Any:
        layer = context.layer
        sleep(layer.backward_s)
        return of_outputs, None, *(layer.gradient(i, s) for i, s in enumerate(context.shapes))


class Nap(nn.Module):
    """A layer with weights of some shapes that sleeps for given seconds."""

    def __init__(self, forward_s: float, backward_s: float, shapes: Sequence[Sequence[int]]):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weights = nn.ParameterList(torch.zeros(tuple(shape)) for shape in shapes)
        self._gradients: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep, and sleep again for the gradients."""
        return _Nap.apply(x, self, *self.weights)

    def gradient(self, i: int, shape: torch.Size) -> torch.Tensor:
        """The gradient of a weight."""
        if i not in self._gradients:
            self._gradients[i] = torch.full(shape, 1e-4)
        return self._gradients[i]


def build(name: str, speed: float) -> nn.Sequential:
    """Make the model of a table for a core `speed` times as fast as that of the table.

    Its layers are in about `_PARTS` parts of equal size, which FSDP2 shards each.
    """
    part_bytes = layer_tables.gradient_bytes(name) / _PARTS
    parts: list[list[Nap]] = [[]]
    n_bytes = 0
    for row in layer_tables.read()[name]["layers"]:
        if n_bytes >= part_bytes:
            parts.append([])
            n_bytes = 0
        parts[-1].append(Nap(row["forward_s"] / speed, row["backward_s"] / speed, row["weights"]))
        n_bytes += 4 * sum(math.prod(shape) for shape in row["weights"])
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))
