"""Sharded parameters: each rank reduces and updates its own part, and has its optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tfscale.comm.backends.base import Group
from tfscale.config import require
from tfscale.exchange.allreduce import Allreduce, require_bucket_mb
from tfscale.exchange.base import UNKNOWN_BATCH, DenseLayer, Exchange
from tfscale.exchange.plan import ExchangePlan, Table, compile_plan, cut_parameters
from tfscale.plan.buckets import Kind, auto_bucket_bytes
from tfscale.plan.layers import is_partial_cheaper

DENSE = ("auto", "weights", "partial", "replicated")


@dataclass(frozen=True)
class Sharded(Exchange):
    """Gradients go to the ranks that own the parameters; updated parameters come back.

    Parameters lie in flat buffers that are cut into one segment for each rank. A rank receives the
    gradients of its own segment from all others, sums them, updates that segment (the optimizer's
    state exists for it alone) and sends the updated parameters to all. As many values are sent as
    by an allreduce, but the second half overlaps with the next forward pass. With a compression
    changes of the parameters are sent: owners keep exact ones, all ranks equal ones near them.

    Attributes:
        bucket_mb: Largest bucket in MiB; "auto" makes about eight buckets; 0 gives each
            variable its own bucket.
        dense: Exchange of Dense layers. "weights": their weight gradients, like those of all other
            layers. "partial": each rank receives the activations for its rows of the kernel and all
            output gradients, and computes the gradient of its rows for the whole batch.
            "replicated": all ranks receive all activations and output gradients. This never sends
            fewer values than "partial", and each rank computes the whole gradient; it is meant for
            comparison. "auto": "partial" for layers where it sends fewer values than "weights"
            ([T] eq. 4.8), else "weights"; it needs the batch size, of the `GlobalBatches` given to
            `fit` or of `tfscale.prepare(model, batch_size=...)`. Layers unfit for it, such as
            subclasses of Dense and layers with a regularizer, exchange weights; a log line names
            the layer and the reason.
        overlap_forward: Let a step end before the parameters have arrived; a read of a parameter
            waits for it. Needs a prepared model (any tfscale callback, or `tfscale.prepare`).
        overlap: False waits for all gradients before any is sent: the baseline of the papers.

    Source: [T] chapter 4 and 5.2.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((255,)), keras.layers.Dense(1024)])
        >>> optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        >>> optimizer = tfscale.DistributedOptimizer(optimizer, exchange=tfscale.Sharded())
        >>> optimizer.build(model.trainable_variables)
        >>> optimizer.memory_report()["state"]  # bytes; about 1/n of it on each of n ranks
        1048588
    """

    bucket_mb: float | Literal["auto"] = "auto"
    dense: Literal["auto", "weights", "partial", "replicated"] = "auto"
    overlap_forward: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        require_bucket_mb(self.bucket_mb)
        choices = ", ".join(map(repr, DENSE))
        require(self.dense in DENSE, "dense", f"one of {choices}", self.dense)

    is_sharding = True

    @property
    def waits_for_gathers(self) -> bool:  # type: ignore[override]
        """Whether a step ends after all parameters have arrived."""
        return not self.overlap_forward

    @property
    def needs_prepared(self) -> str:  # type: ignore[override]
        """The option for dense layers that exchange activations: these need a prepared model."""
        return f"dense={self.dense!r}" if self.dense in ("partial", "replicated") else ""

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return a plan in which each rank owns a segment of every bucket of shared parameters."""
        specs, mb = [table.parameters[i].spec for i in table.shared], self.bucket_mb
        n_bytes = auto_bucket_bytes(specs) if mb == "auto" else int(mb * 2**20)
        segments = cut_parameters(table, table.shared, group.size, n_bytes)
        return compile_plan(table, lambda specs: (), segments, self.overlap)

    def whole(self) -> Exchange:
        """Return an allreduce in buckets of the same size."""
        return Allreduce(self.bucket_mb, self.overlap)

    def dense_kinds(
        self, layers: Sequence[DenseLayer], size: int, global_batch: int | None
    ) -> list[tuple[Kind, str]]:
        """Apply `dense` to each layer; see `Exchange.dense_kinds`."""
        return [dense_kind(self.dense, layer, size, global_batch) for layer in layers]


def dense_kind(
    asked: str, layer: DenseLayer, size: int, global_batch: int | None
) -> tuple[Kind, str]:
    """Return the exchange of a layer, and the reason if it is not the one that was asked for."""
    if asked == "weights" or layer.why_not:
        return "weights", layer.why_not if asked != "weights" else ""
    if asked == "replicated":
        return "replicated", ""
    reason = layer.why_uncut or _why_not_partial(asked, layer, size, global_batch)
    return ("weights", reason) if reason else ("partial", "")


def _why_not_partial(asked: str, layer: DenseLayer, size: int, global_batch: int | None) -> str:
    if layer.n_in < size:
        return f"the kernel has {layer.n_in} rows for {size} ranks"
    if asked == "partial":
        return ""
    if global_batch is None or layer.positions is None:
        return UNKNOWN_BATCH
    if is_partial_cheaper(layer.n_in, layer.n_out, global_batch * layer.positions, size):
        return ""
    return f"they are fewer values at a global batch of {global_batch}"
