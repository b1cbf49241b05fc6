"""What an exchange strategy is, and what all of them are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tfscale.comm.backends.base import Group, Scaling
from tfscale.comm.runtime import Average, Sum
from tfscale.config import ConfigError


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

    def __post_init__(self) -> None:
        """Check what users choose.

        Raises:
            ConfigError: Something does not fit.
        """
        if self.op not in (Average, Sum):
            raise ConfigError(f"op must be Average or Sum for gradients. Received: op={self.op!r}.")
        if self.predivide != 1.0 and self.op != Average:
            raise ConfigError(
                "gradient_predivide_factor needs op=Average. "
                f"Received: gradient_predivide_factor={self.predivide}, op={self.op}."
            )
        if not self.predivide > 0:
            raise ConfigError(
                "gradient_predivide_factor must be greater than 0. "
                f"Received: gradient_predivide_factor={self.predivide}."
            )
        if not hasattr(self.compression, "compress"):
            raise ConfigError(
                "compression must be Compression.none, Compression.fp16 or Compression.bf16. "
                f"Received: compression={self.compression!r}."
            )
        groups = [] if self.groups is None else self.groups
        is_list = isinstance(groups, list | tuple)
        if (
            self.num_groups < 0
            or not is_list
            or not all(isinstance(g, list | tuple) for g in groups)
        ):
            raise ConfigError(
                "groups must be a number of 0 or more, or lists of variables that travel together. "
                f"Received: num_groups={self.num_groups}, groups={self.groups!r}."
            )

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
