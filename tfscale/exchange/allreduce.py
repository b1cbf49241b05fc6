"""Plain synchronous data parallelism: gradients are averaged in buckets as they become ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tfscale.comm.backends.base import Group
from tfscale.config import require
from tfscale.exchange.base import Exchange
from tfscale.exchange.plan import ExchangePlan, Table, compile_plan
from tfscale.plan.buckets import Bucket, GradientSpec, auto_bucket_bytes, build_buckets


@dataclass(frozen=True)
class Allreduce(Exchange):
    """Every rank receives the mean gradient and applies the same update.

    Buckets are cut in the order of back-propagation, so the exchange of the last layers runs
    while the gradients of the first ones are computed.

    Attributes:
        bucket_mb: Largest bucket in MiB; "auto" makes about eight buckets; 0 sends each
            gradient alone.
        overlap: False waits for all gradients before any is sent: the baseline of the papers.

    Source: [T] 2.3; [S] figure 6.

    Examples:
        >>> tfscale.init()
        >>> exchange = tfscale.Allreduce(bucket_mb=4)
        >>> optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.5), exchange=exchange)
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer.apply([tf.constant([1.0, 1.0])], [weight])
        >>> weight.numpy().tolist()
        [0.5, 1.5]
    """

    bucket_mb: float | Literal["auto"] = "auto"
    overlap: bool = True

    def __post_init__(self) -> None:
        require_bucket_mb(self.bucket_mb)

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return a plan that sums each bucket of gradients."""
        return compile_plan(table, self._buckets, overlap=self.overlap)

    def _buckets(self, specs: list[GradientSpec]) -> tuple[Bucket, ...]:
        if self.bucket_mb == "auto":
            return build_buckets(specs, auto_bucket_bytes(specs))
        return build_buckets(specs, int(self.bucket_mb * 2**20))


def require_bucket_mb(bucket_mb: Any) -> None:
    """Raise a ConfigError unless the size of buckets is valid."""
    fits = bucket_mb == "auto" or (isinstance(bucket_mb, int | float) and bucket_mb >= 0)
    require(fits, "bucket_mb", "'auto' or a number of MiB, 0 or more", bucket_mb)
