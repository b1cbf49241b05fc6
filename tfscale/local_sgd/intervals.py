"""Rules for the number of steps between two averages of local SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfscale.config import ConfigError, is_count

LONGEST = 1 << 40  # steps: without an average until the end of training
SLACK = 1.000001  # before rounding down: rates are float32


@dataclass(frozen=True)
class AdaptiveInterval:
    """An interval between averages that shrinks with the training loss.

    After each epoch the interval becomes `ceil(initial * sqrt(loss / first loss))` or, if that is
    not less than the previous interval, `shrink` times the previous interval. It is never less than
    `minimum`.

    Attributes:
        initial: Steps between two averages in the first epoch.
        shrink: Factor in (0, 1).
        minimum: Lower bound of the interval, 1 or more.

    Source: Wang, Joshi: Adaptive communication strategies for local-update SGD (AdaComm), 2019,
    eqs. 17 and 18.

    Examples:
        >>> rule = tfscale.AdaptiveInterval(initial=64)
        >>> exchange = tfscale.LocalSGD(groups=2, interval=rule)
        >>> rule.after(interval=64, loss=0.25, first_loss=1.0)
        32
    """

    initial: int = 64
    shrink: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        if not (self.initial >= self.minimum >= 1 and 0 < self.shrink < 1):
            raise ConfigError(
                "AdaptiveInterval needs initial >= minimum >= 1 and 0 < shrink < 1. Received: "
                f"initial={self.initial}, minimum={self.minimum}, shrink={self.shrink}."
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
        wanted = math.ceil(self.initial * math.sqrt(loss / first_loss))
        if wanted >= interval:
            wanted = int(self.shrink * interval)
        return max(self.minimum, wanted)


@dataclass(frozen=True)
class GrowingInterval:
    """An interval between averages that grows by the same number of steps after each average.

    After i averages the interval is `initial * (1 + growth * i)`, rounded down, and at most
    `maximum`.

    Attributes:
        initial: Steps before the first average, 1 or more.
        growth: Share of `initial` that each average adds, more than 0.
        maximum: Upper bound of the interval.

    Source: Haddadpour et al.: Local SGD with periodic averaging: tighter analysis and adaptive
    synchronization, 2019, and the program published with it.

    Examples:
        >>> rule = tfscale.GrowingInterval(initial=8, growth=0.5, maximum=16)
        >>> exchange = tfscale.LocalSGD(groups=2, interval=rule)
        >>> exchange.first_interval
        8
    """

    initial: int = 8
    growth: float = 0.1
    maximum: int = 64

    def __post_init__(self) -> None:
        if not (is_count(self.initial) and self.maximum >= self.initial and self.growth > 0):
            raise ConfigError(
                "GrowingInterval needs maximum >= initial >= 1 and growth > 0. Received: "
                f"initial={self.initial}, growth={self.growth}, maximum={self.maximum}."
            )

    @property
    def minimum(self) -> int:
        """Lower bound of the interval."""
        return self.initial


@dataclass(frozen=True)
class QuadraticInterval:
    """An interval between averages that grows as the learning rate falls (QSR).

    After each average the interval becomes `(alpha / rate)^2`, rounded down and at least `minimum`.
    It stays `minimum` during a warm-up: before the second average, and as long as the rate has
    risen since the last one. The rate must be equal on all ranks.

    Attributes:
        alpha: The rate at which the interval would be one step; more than the largest rate.
        minimum: Steps between two averages at high rates, 1 or more.

    Source: Gu, Lyu, Arora, Huang: A quadratic synchronization rule for distributed deep learning,
    2023, arXiv 2310.14423.

    Examples:
        >>> rule = tfscale.QuadraticInterval(alpha=0.2, minimum=4)
        >>> exchange = tfscale.LocalSGD(groups=2, interval=rule)
        >>> [rule.at(rate) for rate in (0.1, 0.05, 0.025)]  # steps
        [4, 16, 64]
    """

    alpha: float
    minimum: int = 4

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and math.isfinite(self.alpha) and is_count(self.minimum)):
            raise ConfigError(
                "QuadraticInterval needs alpha > 0 and minimum >= 1. Received: "
                f"alpha={self.alpha}, minimum={self.minimum}."
            )

    @property
    def initial(self) -> int:
        """Steps before the first average."""
        return self.minimum

    def at(self, rate: float) -> int:
        """Return the interval at a learning rate, after the warm-up."""
        if not rate > 0:
            return LONGEST
        return max(self.minimum, int(min(LONGEST, SLACK * (self.alpha / rate) ** 2)))


@dataclass(frozen=True)
class DistanceGuard:
    """Averages when the groups' models are too far from the last average, or after `maximum` steps.

    The distance is the mean over groups of `||W_i - last average||`, which is no less than the
    distance D from the coming average ([L] eq. 9). Measuring it sends one number per group.

    Attributes:
        limit: Largest distance without an average, more than 0.
        maximum: Largest number of steps between two averages.
        every: Steps between two measurements.

    Examples:
        >>> rule = tfscale.DistanceGuard(limit=0.5, maximum=32)
        >>> exchange = tfscale.LocalSGD(groups=2, interval=rule)
        >>> exchange.first_interval, exchange.least_interval  # steps between averages
        (32, 1)
    """

    limit: float
    maximum: int = 64
    every: int = 1

    def __post_init__(self) -> None:
        if not (self.limit > 0 and is_count(self.maximum) and is_count(self.every)):
            raise ConfigError(
                "DistanceGuard needs limit > 0, maximum >= 1 and every >= 1. Received: "
                f"limit={self.limit}, maximum={self.maximum}, every={self.every}."
            )

    @property
    def initial(self) -> int:
        """Steps between two averages if the distance stays below the limit."""
        return self.maximum

    @property
    def minimum(self) -> int:
        """Lower bound of the interval."""
        return self.every


IntervalRule = AdaptiveInterval | GrowingInterval | QuadraticInterval | DistanceGuard
