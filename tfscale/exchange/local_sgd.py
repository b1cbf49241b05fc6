"""Local SGD: groups of ranks train separately, and their models are averaged periodically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import keras

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError, is_count, require
from tfscale.exchange.base import Exchange, resolve
from tfscale.exchange.plan import ExchangePlan, Table
from tfscale.exchange.sharded import Sharded


@dataclass(frozen=True)
class AdaptiveInterval:
    """An interval between averages that shrinks with the training loss.

    After each epoch the interval becomes `ceil(start * sqrt(loss / first loss))` or, if that is not
    less than the previous interval, `shrink` times the previous interval. It is never less than
    `least`.

    Attributes:
        start: Steps between two averages in the first epoch.
        shrink: Factor in (0, 1).
        least: Lower bound of the interval, 1 or more.

    Source: Wang, Joshi: Adaptive communication strategies for local-update SGD (AdaComm), 2019,
    eqs. 17 and 18.
    """

    start: int = 64
    shrink: float = 0.5
    least: int = 1

    def __post_init__(self) -> None:
        if not (self.start >= self.least >= 1 and 0 < self.shrink < 1):
            raise ConfigError(
                "AdaptiveInterval needs start >= least >= 1 and 0 < shrink < 1. Received: "
                f"start={self.start}, least={self.least}, shrink={self.shrink}."
            )

    def after(self, interval: int, loss: float, first_loss: float) -> int:
        """Return the interval of the next epoch.

        Args:
            interval: Interval of the epoch that has ended.
            loss: Training loss of that epoch, averaged over all ranks.
            first_loss: Training loss of the first epoch.
        """
        if not (math.isfinite(loss) and loss >= 0 and first_loss > 0):
            return interval
        wanted = math.ceil(self.start * math.sqrt(loss / first_loss))
        if wanted >= interval:
            wanted = int(self.shrink * interval)
        return max(self.least, wanted)


@dataclass(frozen=True)
class GrowingInterval:
    """An interval between averages that grows by the same number of steps after each average.

    After i averages the interval is `start * (1 + growth * i)`, rounded down, and at most `most`.

    Attributes:
        start: Steps before the first average, 1 or more.
        growth: Share of `start` that each average adds, more than 0.
        most: Upper bound of the interval.

    Source: Haddadpour et al.: Local SGD with periodic averaging: tighter analysis and adaptive
    synchronization, 2019, and the program published with it.
    """

    start: int = 8
    growth: float = 0.1
    most: int = 64

    def __post_init__(self) -> None:
        if not (is_count(self.start) and self.most >= self.start and self.growth > 0):
            raise ConfigError(
                "GrowingInterval needs most >= start >= 1 and growth > 0. Received: "
                f"start={self.start}, growth={self.growth}, most={self.most}."
            )

    @property
    def least(self) -> int:
        """Lower bound of the interval."""
        return self.start


@dataclass(frozen=True)
class DistanceGuard:
    """Averages when the groups' models are too far from the last average, or after `most` steps.

    The distance is the mean over groups of `||W_i - last average||`, which is no less than the
    distance D from the coming average ([L] eq. 9). Measuring it sends one number per group.

    Attributes:
        limit: Largest distance without an average, more than 0.
        most: Largest number of steps between two averages.
        every: Steps between two measurements.
    """

    limit: float
    most: int = 64
    every: int = 1

    def __post_init__(self) -> None:
        if not (self.limit > 0 and is_count(self.most) and is_count(self.every)):
            raise ConfigError(
                "DistanceGuard needs limit > 0, most >= 1 and every >= 1. Received: "
                f"limit={self.limit}, most={self.most}, every={self.every}."
            )

    @property
    def start(self) -> int:
        """Steps between two averages if the distance stays below the limit."""
        return self.most

    @property
    def least(self) -> int:
        """Lower bound of the interval."""
        return self.every


IntervalRule = AdaptiveInterval | GrowingInterval | DistanceGuard


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
            `DistanceGuard`.
        within: The exchange inside a group: any other strategy, or its name.
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
        overlap: Steps after which the average of a fragment is merged into the parameters, during
            which training does not wait for it; less than `interval`. 0 waits. "auto" measures
            averages and steps, and uses the smallest number that hides an average.
        merge: None adds the change of the average to the parameters, which keeps what a group has
            learned in the meantime. A number in [0, 1) is the weight of the group's own
            parameters, and the average has the rest.

    Source: [L] III-B; for fragments and overlap Douillard et al.: Streaming DiLoCo with overlapping
    communication, 2025.
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
        rules = "AdaptiveInterval(...), GrowingInterval(...) or DistanceGuard(...)"
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
                "An outer optimizer works on averaged parameters. Received: average='gradients' "
                "and outer. Leave one out."
            )
        self._require_overlap()

    @property
    def is_overlapped(self) -> bool:
        """True if averages are sent in fragments, or merged later than they are sent."""
        return self.fragments > 1 or self.overlap != 0

    @property
    def least_interval(self) -> int:
        """The smallest number of steps between two averages."""
        interval = self.interval
        return interval.least if isinstance(interval, IntervalRule) else int(interval)

    @property
    def first_interval(self) -> int:
        """Steps before the first average, unless a `DistanceGuard` asks for it earlier."""
        interval = self.interval
        return interval.start if isinstance(interval, IntervalRule) else int(interval)

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
        if self.is_overlapped and isinstance(self.interval, DistanceGuard):
            raise ConfigError(
                "Averages that overlap with training are sent at fixed steps. Received: "
                f"interval={self.interval}, fragments={self.fragments}, overlap={self.overlap!r}. "
                "Use fragments=1 and overlap=0, or another interval."
            )
        if self.is_overlapped and (self.average == "gradients" or self.average_state):
            raise ConfigError(
                "Averages that overlap with training are of parameters. Received: "
                f"average={self.average!r}, average_state={self.average_state}, "
                f"fragments={self.fragments}, overlap={self.overlap!r}. Use fragments=1 and "
                "overlap=0, or average='parameters' without average_state."
            )

    def members(self, local_ranks: Sequence[int]) -> list[list[int]]:
        """Return the ranks of each group, given each rank's number among those of its host."""
        size, n = len(local_ranks), self.groups
        if n == "host":
            n = sum(local_rank == 0 for local_rank in local_ranks)
            if list(local_ranks) != [rank % (size // n) for rank in range(size)]:
                # A rank averages its segment with the ranks in its place in other groups.
                raise ConfigError(
                    "Groups of hosts need equally many ranks on each, started host by host. "
                    f"Received: groups='host' and local ranks {list(local_ranks)}, in rank order. "
                    "Start the same number of ranks on each host, or pass a number of groups."
                )
        if size % n:
            raise ConfigError(
                f"groups must divide the number of ranks, {size}. Received: groups={n}."
            )
        m = size // n
        return [list(range(i * m, (i + 1) * m)) for i in range(n)]

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return the plan of a step inside a group."""
        return self.within_group().plan(table, group)

    def within_group(self) -> Exchange:
        """Return the exchange inside a group."""
        return resolve(self.within)

    def whole(self) -> Exchange:
        """Raise a ConfigError: averaging follows updates, which a tape does not make."""
        raise ConfigError(
            "Local SGD averages parameters after updates. Received: exchange=LocalSGD for a tape. "
            "Use DistributedOptimizer."
        )
