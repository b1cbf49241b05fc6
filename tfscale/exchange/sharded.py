"""Sharded parameters: each rank reduces, updates and keeps the optimizer state of its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.allreduce import Allreduce
from tfscale.exchange.base import GradientOptions
from tfscale.plan.buckets import GradientSpec, auto_bucket_bytes
from tfscale.plan.segments import SegmentedBucket, build_segments

DENSE = ("auto", "weights", "partial", "replicated")


@dataclass(frozen=True)
class Sharded:
    """Gradients go to the ranks that own the parameters; updated parameters come back.

    Parameters lie in flat buffers that are cut into one segment for each rank. A rank receives the
    gradients of its own segment from all others, sums them, updates that segment (the optimizer's
    state exists for it alone) and sends the updated parameters to all. The values that travel are
    those of an allreduce, but the second half of them travels behind the next forward pass.

    Attributes:
        bucket_mb: Largest bucket in MiB; "auto" cuts the model into about eight; 0 gives each
            variable its own.
        dense: How the gradients of Dense kernels are made. "weights" exchanges them like all
            others. "partial" sends each rank the activations of its rows of the kernel and all
            errors, from which it makes the gradient of its rows for the whole batch. "replicated"
            sends all activations and errors to all ranks, which never moves fewer values than
            "partial" and costs each rank the whole gradient: for comparison. "auto" takes
            "partial" for the layers where it moves fewer values than "weights" ([T] eq. 4.8), and
            never "replicated". Layers that cannot, such as subclasses of Dense and those with a
            regularizer, exchange weights; a log line says which and why.
        overlap_forward: Let a step end before the parameters have arrived; whoever reads one waits
            for it. Needs a prepared model (any tfscale callback, or `tfscale.prepare`).
        overlap: False waits for all gradients before any is sent: the baseline of the papers.
        global_batch: Samples of all ranks together, for "auto"; None takes that of the
            `GlobalBatches` that `fit` is given, and "weights" where there is none.

    Source: [T] chapter 4 and 5.2.
    """

    bucket_mb: float | Literal["auto"] = "auto"
    dense: Literal["auto", "weights", "partial", "replicated"] = "auto"
    overlap_forward: bool = True
    overlap: bool = True
    global_batch: int | None = None

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: An option does not fit.
        """
        Allreduce(self.bucket_mb)  # checks the size of buckets
        if self.dense not in DENSE:
            raise ConfigError(
                f"dense must be one of {', '.join(map(repr, DENSE))}. Received: {self.dense!r}."
            )
        batch = self.global_batch
        if batch is not None and (isinstance(batch, bool) or int(batch) != batch or batch < 1):
            raise ConfigError(f"global_batch must be 1 or more. Received: global_batch={batch!r}.")

    def cuts(self, variable: Any) -> bool:
        """Return whether each rank updates a part of a variable only: all variables."""
        del variable
        return True

    def dense_of(self, path: str) -> Any:
        """Return how the gradient of a Dense layer is made: one of `DENSE`.

        Args:
            path: Of the layer.
        """
        del path
        return self.dense

    def segments(
        self,
        specs: Sequence[GradientSpec],
        size: int,
        whole: frozenset[int],
        by_rows: Sequence[tuple[int, ...]],
    ) -> tuple[SegmentedBucket, ...]:
        """Return the buckets of the variables that are cut; see `build_segments`."""
        mb = self.bucket_mb
        n_bytes = auto_bucket_bytes(specs) if mb == "auto" else int(mb * 2**20)
        return build_segments(specs, size, n_bytes, whole, by_rows)

    def route(self, exchange: Callable[..., list[Any]], arrived: list[tf.Tensor]) -> Any:
        """Return what exchanges all gradients: the same.

        Args:
            exchange: Of the variables that are cut.
            arrived: Not used.
        """
        del arrived
        return exchange

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        group: Group,
        options: GradientOptions,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return the reduced gradients, whole: what a tape or an unknown optimizer gets.

        `DistributedOptimizer` goes another way where it can: see `tfscale.update.sharded`.

        Args:
            gradients: Tensors or IndexedSlices, one per variable; no None.
            variables: The variables they belong to.
            group: Who takes part.
            options: How they are reduced.

        Raises:
            PlanError: A gradient's shape is not known.
            ExchangeError: Communication failed.
        """
        whole = Allreduce(self.bucket_mb, self.overlap)
        return whole.exchange(gradients, variables, group, options)
