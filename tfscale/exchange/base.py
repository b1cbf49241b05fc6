"""What an exchange strategy is, and what all of them are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tfscale.backends.base import Group, Scaling


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are reduced; the same for every strategy.

    Attributes:
        op: "Average" or "Sum".
        predivide: Divide by this before the sum and by size / predivide after it (Average).
        compression: See `tfscale.Compression`.
        sparse_as_dense: Make IndexedSlices dense first.
        num_groups: Number of buckets; 0 leaves it to the strategy.
        groups: Variables that travel together, by object; None leaves it to the strategy.
    """

    op: str = "Average"
    predivide: float = 1.0
    compression: Any = None
    sparse_as_dense: bool = False
    num_groups: int = 0
    groups: Sequence[Sequence[Any]] | None = None

    def factors(self) -> Scaling:
        """Return what is multiplied before and after the sum, besides the mean's division."""
        return Scaling(1.0 / self.predivide, self.predivide)


class Exchange(Protocol):
    """A strategy: an immutable description that turns local gradients into common ones."""

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        group: Group,
        options: GradientOptions,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return gradients that are equal on all ranks, in the order of `variables`."""
        ...
