"""`LocalSGD`: groups of ranks train apart, and their models are averaged periodically."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import keras

from tfscale.comm.backends.base import Group
from tfscale.comm.compression import SparseCompressor, refuse_low_rank
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import ConfigError, is_count, require
from tfscale.exchange.base import Exchange, resolve
from tfscale.exchange.plan import ExchangePlan, GradientOptions, Table
from tfscale.exchange.sharded import Sharded
from tfscale.local_sgd.groups import Groups, local_ranks
from tfscale.local_sgd.intervals import DistanceGuard, IntervalRule


@dataclass(frozen=True)
class LocalSGD(Exchange):
    """Ranks exchange gradients within groups; the groups' models are averaged periodically.

    With `Sharded()` inside a group, a rank averages only its own segment, with the ranks of other
    groups that own the same segment, before the group gathers it. The optimizer's `compression`
    applies to changes of parameters since the last average, or to sums of gradients.

    Attributes:
        groups: Number of groups; it must divide the number of ranks. Ranks of a group are
            consecutive, so groups match hosts if ranks are placed host by host. "host" makes one
            group of each host, for hosts with equally many ranks.
        interval: Steps between two averages, 1 or more, or `AdaptiveInterval`, `GrowingInterval`,
            `QuadraticInterval`, `DistanceGuard`.
        within: The exchange inside a group: another strategy, or its name.
        average: "parameters" takes the mean of the groups' parameters; "gradients" (SASGD) moves
            the last common parameters by the learning rate times the mean of the groups' sums of
            gradients since then.
        start: "immediately"; the number of the first local epoch (0 or more); or
            "after_first_decay" (post-local SGD): after the first step of the first epoch that
            begins with a lower learning rate. Before that all ranks train together with `within`.
        outer: A Keras optimizer that applies the change of the average as a gradient, as in DiLoCo;
            None assigns the average.
        average_state: Average momentum and other state of the optimizer, too.
        fragments: Parts of the model that are averaged one after another, evenly spread over the
            interval; at most `interval`.
        overlap: Steps between sending a fragment and merging its average, while training continues;
            less than `interval`. 0 waits. "auto" measures
            averages and steps, and uses the smallest number that hides an average.
        merge: None adds the change of the average to the parameters, which keeps what a group has
            learned in the meantime. A number in [0, 1) is the weight of the group's own
            parameters, and the average has the rest.

    Source: [L] III-B; for fragments and overlap Douillard et al.: Streaming DiLoCo with overlapping
    communication, 2025.

    Examples:
        >>> tfscale.init()
        >>> exchange = tfscale.LocalSGD(groups=tfscale.size(), interval=4)
        >>> optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.5), exchange=exchange)
        >>> weight = keras.Variable([1.0, 2.0])
        >>> for _ in range(4):  # the groups' weights are averaged after the last of these steps
        ...     optimizer.apply([tf.constant([1.0, 1.0])], [weight])
        >>> weight.numpy().tolist()
        [-1.0, 0.0]
    """

    groups: int | Literal["host"]
    interval: int | IntervalRule = 8
    within: Any = field(default_factory=Sharded)
    average: Literal["parameters", "gradients"] = "parameters"
    start: int | Literal["immediately", "after_first_decay"] = "immediately"
    outer: keras.optimizers.Optimizer | None = None
    average_state: bool = False
    fragments: int = 1
    overlap: int | Literal["auto"] = 0
    merge: float | None = None

    def __post_init__(self) -> None:
        start, interval = self.start, self.interval
        fits = self.groups == "host" or is_count(self.groups)
        require(fits, "groups", "1 or more, or 'host'", self.groups)
        fits = is_count(interval) or isinstance(interval, IntervalRule)
        rules = (
            "AdaptiveInterval(...), GrowingInterval(...), QuadraticInterval(...) or "
            "DistanceGuard(...)"
        )
        require(fits, "interval", f"1 or more, {rules}", interval)
        fits = not isinstance(self.within, LocalSGD)
        require(fits, "within", "an exchange inside of a group", self.within)
        fits = self.average in ("parameters", "gradients")
        require(fits, "average", "'parameters' or 'gradients'", self.average)
        fits = start in ("immediately", "after_first_decay") or is_count(start, 0)
        require(fits, "start", "'immediately', 'after_first_decay' or an epoch", start)
        fits = self.outer is None or isinstance(self.outer, keras.optimizers.Optimizer)
        require(fits, "outer", "a Keras optimizer or None", self.outer)
        if self.average == "gradients" and self.outer is not None:
            raise ConfigError(
                "outer needs average='parameters'. Received: average='gradients' and outer. "
                "Leave one out."
            )
        self._require_overlap()

    trains_apart = True

    @property
    def is_overlapped(self) -> bool:
        """True if averages are sent in fragments, or merged later than they are sent."""
        return self.fragments > 1 or self.overlap != 0

    @property
    def least_interval(self) -> int:
        """The smallest number of steps between two averages."""
        interval = self.interval
        return interval.minimum if isinstance(interval, IntervalRule) else int(interval)

    @property
    def first_interval(self) -> int:
        """Steps before the first average, unless a `DistanceGuard` asks for it earlier."""
        interval = self.interval
        return interval.initial if isinstance(interval, IntervalRule) else int(interval)

    @property
    def first_overlap(self) -> int:
        """Steps between sending and merging; with "auto" the most, until averages are measured."""
        return self.least_interval - 1 if self.overlap == "auto" else int(self.overlap)

    def _require_overlap(self) -> None:
        least = self.least_interval
        fits = is_count(self.fragments) and self.fragments <= least
        require(fits, "fragments", f"1 to the smallest interval, {least}", self.fragments)
        fits = self.overlap == "auto" or (is_count(self.overlap, 0) and self.overlap < least)
        fits = fits and (self.overlap != "auto" or least > 1)
        text = f"'auto' or a number of steps less than the smallest interval, {least}"
        require(fits, "overlap", text, self.overlap)
        fits = self.merge is None or (self.is_overlapped and 0 <= self.merge < 1)
        require(fits, "merge", "None, or a number in [0, 1) together with overlap", self.merge)
        if self.is_overlapped:
            self._require_parameters("overlap and fragments need")

    def _require_parameters(self, what: str) -> None:
        """Raise a ConfigError for averages that are not posted."""
        if isinstance(self.interval, DistanceGuard):
            raise ConfigError(
                f"{what} an interval that is counted in steps. Received: "
                f"interval={self.interval}, fragments={self.fragments}, "
                f"overlap={self.overlap!r}. Use another interval, or none of these."
            )
        if self.average == "gradients" or self.average_state:
            raise ConfigError(
                f"{what} averages of parameters. Received: "
                f"average={self.average!r}, average_state={self.average_state}, "
                f"fragments={self.fragments}, overlap={self.overlap!r}. Use average='parameters' "
                "without average_state, or none of these."
            )

    def members(self, local_ranks: Sequence[int]) -> list[list[int]]:
        """Return the ranks of each group, given each rank's number among those of its host."""
        size, n = len(local_ranks), self.groups
        if n == "host":
            n = sum(local_rank == 0 for local_rank in local_ranks)
            if list(local_ranks) != [rank % (size // n) for rank in range(size)]:
                # A rank averages its segment with the ranks in its place in other groups.
                raise ConfigError(
                    "groups='host' needs as many ranks on each, started host by host. Received: "
                    f"groups='host' and local ranks {list(local_ranks)}, in rank order. Start "
                    "the same number of ranks on each host, or pass a number of groups."
                )
        if size % n:
            raise ConfigError(
                f"groups must divide the number of ranks, {size}. Received: groups={n}."
            )
        m = size // n
        return [list(range(i * m, (i + 1) * m)) for i in range(n)]

    def refuse(self, options: GradientOptions, nonfinite: str, where: str) -> None:
        """Raise a ConfigError for what averages do not allow; see `Exchange.refuse`."""
        refuse_low_rank(options.compression, where)
        if isinstance(options.compression, SparseCompressor):
            self._require_parameters("Compression.sparse needs")
        if nonfinite == "skip" and self.average == "gradients":
            raise ConfigError(
                "nonfinite='skip' excludes average='gradients'. Received: nonfinite='skip' with "
                "LocalSGD(average='gradients'). Use nonfinite='raise', or average='parameters'."
            )

    def form_groups(self, process_set: ProcessSet) -> Groups:
        """Form groups of all ranks, which train apart from `start` on. Collective."""
        if process_set is not global_process_set:
            raise ConfigError(
                f"process_set must be all ranks. Received: {process_set!r}. Leave process_set out."
            )
        groups = Groups(self, self.members(local_ranks()))
        return groups.apart() if self.start == "immediately" else groups

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return the plan of a step inside a group."""
        return self.within_group().plan(table, group)

    def within_group(self) -> Exchange:
        """Return the exchange inside a group."""
        return resolve(self.within)

    def whole(self) -> Exchange:
        """Raise a ConfigError: averaging follows updates, which a tape does not make."""
        raise ConfigError(
            "exchange=LocalSGD cannot serve a tape. Received: exchange=LocalSGD for a tape. Use "
            "DistributedOptimizer."
        )
