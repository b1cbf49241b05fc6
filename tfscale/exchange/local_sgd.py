"""Local SGD: groups of ranks train each on their own and average from time to time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import keras

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.base import Exchange, is_count, require, resolve
from tfscale.exchange.plan import ExchangePlan, Table
from tfscale.exchange.sharded import Sharded


@dataclass(frozen=True)
class AdaptiveInterval:
    """An interval between averages that shrinks with the training loss.

    After each epoch the interval becomes `ceil(start * sqrt(loss / first loss))`; where that is no
    less than before, `shrink` times the interval before. It never falls below `least`.

    Attributes:
        start: Steps between two averages in the first epoch.
        shrink: In (0, 1).
        least: 1 or more.

    Source: Wang, Joshi: Adaptive communication strategies for local-update SGD (AdaComm), 2019,
    eqs. 17 and 18.
    """

    start: int = 64
    shrink: float = 0.5
    least: int = 1

    def __post_init__(self) -> None:
        """Check ranges."""
        if not (self.start >= self.least >= 1 and 0 < self.shrink < 1):
            raise ConfigError(
                "AdaptiveInterval needs start >= least >= 1 and 0 < shrink < 1. Received: "
                f"start={self.start}, least={self.least}, shrink={self.shrink}."
            )

    def after(self, interval: int, loss: float, first_loss: float) -> int:
        """Return the interval of the next epoch.

        Args:
            interval: That of the epoch that has ended.
            loss: Its training loss, averaged over all ranks.
            first_loss: That of the first epoch.
        """
        if not (math.isfinite(loss) and loss >= 0 and first_loss > 0):
            return interval
        wanted = math.ceil(self.start * math.sqrt(loss / first_loss))
        if wanted >= interval:
            wanted = int(self.shrink * interval)
        return max(self.least, wanted)


@dataclass(frozen=True)
class LocalSGD(Exchange):
    """Groups of ranks exchange gradients inside only; their models are averaged now and then.

    With `Sharded()` inside, a rank averages its own segment only, with the ranks of other groups
    that own the same one, before the group gathers it. With the optimizer's `compression` groups
    send in few bits how far they have moved since the last average, or their sums of gradients.

    Attributes:
        groups: Number of groups; it must divide the number of ranks. Ranks of a group are
            consecutive, so groups follow the hosts where ranks do.
        interval: Steps between two averages, 1 or more, or `AdaptiveInterval`.
        within: What happens inside a group: any other exchange.
        average: "parameters" takes the mean of the groups' parameters; "gradients" (SASGD) moves
            the last common parameters by the learning rate times the mean of the groups' sums of
            gradients since then.
        start: "immediately", the number of the first local epoch (0 or more), or
            "after_first_decay" of the learning rate (post-local SGD): after the first step of the
            epoch that begins at a lower one. Before that all ranks train together, by `within`.
        outer: A Keras optimizer that takes the change of the average as a gradient, as in DiLoCo;
            None takes over the average.
        average_state: Average momentum and other state of the optimizer too.

    Source: [L] III-B.
    """

    groups: int
    interval: int | AdaptiveInterval = 8
    within: Any = field(default_factory=Sharded)
    average: Literal["parameters", "gradients"] = "parameters"
    start: int | Literal["immediately", "after_first_decay"] = "immediately"
    outer: keras.optimizers.Optimizer | None = None
    average_state: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        start, interval = self.start, self.interval
        require(is_count(self.groups), "groups", "1 or more", self.groups)
        fits = isinstance(interval, AdaptiveInterval) or is_count(interval)
        require(fits, "interval", "1 or more, or AdaptiveInterval(...)", interval)
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

    def members(self, size: int) -> list[list[int]]:
        """Return which of `size` ranks are in each group."""
        if size % self.groups:
            raise ConfigError(
                f"groups must divide the number of ranks, {size}. Received: groups={self.groups}."
            )
        m = size // self.groups
        return [list(range(i * m, (i + 1) * m)) for i in range(self.groups)]

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return the plan of a step inside of a group."""
        return self.within_group().plan(table, group)

    def within_group(self) -> Exchange:
        """Return what happens inside of a group."""
        return resolve(self.within)

    def whole(self) -> Exchange:
        """Refuse: averaging needs the update, which a tape does not have."""
        raise ConfigError(
            "Local SGD averages parameters after updates. Received: exchange=LocalSGD for a tape. "
            "Use DistributedOptimizer."
        )
