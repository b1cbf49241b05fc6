"""Fall of the cost per distance gone, theta of [T] eq. 5.4, and the gradient noise scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tfscale.config import ConfigError

Rule = Literal["robust", "thesis", "peak"]
RULES: tuple[Rule, ...] = ("robust", "thesis", "peak")
_FIRST_PERMITTED = 3  # a curve has no change of change before
_CONFIRMATIONS = 2  # changes that must be small in a row; epochs below the peak in a row


def theta_of(first_cost: float, cost: float, distance: float) -> float:
    """Return the ratio of cost reduction to the distance from the first parameters.

    Args:
        first_cost: F(w_0).
        cost: F(w_i).
        distance: ||w_0 - w_i||, the L2 norm over all trainable parameters.

    Returns:
        (F(w_0) - F(w_i)) / ||w_0 - w_i||; NaN where that is no finite number.

    Source: [T] eq. 5.4.
    """
    if not distance > 0:
        return math.nan
    theta = (first_cost - cost) / distance
    return theta if math.isfinite(theta) else math.nan


@dataclass(frozen=True)
class IntervalRule:
    """When an interval is read off the curve of theta.

    Epochs n are counted from 1, which is the first epoch after the warm-up.

    Attributes:
        rule: "thesis" is algorithm 3 to the letter: K = n at the first n >= 2 where
            |theta_n - theta_(n-1)| <= tolerance * |theta_(n-1)|. "robust" wants two such changes
            in a row, n >= 3, and theta finite and positive all the while. "peak" takes the epoch
            of the largest theta, once two epochs in a row lie below it.
        tolerance: Relative change up to which theta counts as unchanged, greater than 0.
        low: Smallest interval in epochs, for "robust" and "peak".
        high: Largest interval; if nothing was found by epoch `high` it is taken. None for no limit.

    Source: [T] algorithm 3; "peak": [T] 5.4, where the published intervals were read off figures.
    """

    rule: Rule = "robust"
    tolerance: float = 0.10
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: A value is outside its range.
        """
        if self.rule not in RULES:
            raise ConfigError(
                f"rule must be one of {', '.join(map(repr, RULES))}. Received: rule={self.rule!r}. "
                "Use 'robust' if in doubt."
            )
        if not self.tolerance > 0:
            raise ConfigError(
                "tolerance is a relative change and must be greater than 0. "
                f"Received: tolerance={self.tolerance!r}. Use 0.1 if in doubt."
            )
        if self.low < 1 or (self.high is not None and self.high < self.low):
            raise ConfigError(
                "The interval must be at least 1 epoch, and its limits in order. "
                f"Received: low={self.low}, high={self.high}. Swap or drop them."
            )


@dataclass(frozen=True)
class Finding:
    """An interval, and why it is this one.

    Attributes:
        interval: Epochs from one growth to the next.
        reason: For logs.
    """

    interval: int
    reason: str


class IntervalFinder:
    """Watches theta epoch by epoch until the interval is found.

    Args:
        settings: What counts as found.

    Attributes:
        thetas: Those of the epochs so far.
    """

    def __init__(self, settings: IntervalRule) -> None:
        self.settings = settings
        self.thetas: list[float] = []

    def observe(self, theta: float) -> Finding | None:
        """Take the theta of the next epoch.

        Args:
            theta: As `theta_of` returns it.

        Returns:
            The interval if this epoch decides it.
        """
        self.thetas.append(theta)
        find = {"robust": self._robust, "thesis": self._thesis, "peak": self._peak}
        found = find[self.settings.rule]()
        return found if self.settings.rule == "thesis" else self._limit(found)

    def _changes(self) -> list[bool]:
        """Return for each epoch from the second on whether theta has hardly changed."""
        pairs = zip(self.thetas, self.thetas[1:], strict=False)
        return [abs(new - old) <= self.settings.tolerance * abs(old) for old, new in pairs]

    def _thesis(self) -> Finding | None:
        if len(self.thetas) < 2 or not self._changes()[-1]:
            return None
        n = len(self.thetas)
        return Finding(n, f"theta changed by {self._change():.1%} in epoch {n}")

    def _robust(self) -> Finding | None:
        n = len(self.thetas)
        usable = [math.isfinite(t) and t > 0 for t in self.thetas[-1 - _CONFIRMATIONS :]]
        if n < _FIRST_PERMITTED or not all(usable):
            return None
        if not all(self._changes()[-_CONFIRMATIONS:]):
            return None
        return Finding(
            n,
            f"theta changed by at most {self.settings.tolerance:.0%} in each of the last "
            f"{_CONFIRMATIONS} epochs ({self._change():.1%} in epoch {n})",
        )

    def _peak(self) -> Finding | None:
        usable = [t if math.isfinite(t) and t > 0 else -math.inf for t in self.thetas]
        best = max(usable)
        peak = usable.index(best) + 1
        if best == -math.inf or len(usable) - peak < _CONFIRMATIONS:
            return None
        return Finding(peak, f"theta peaked at {best:.4g} in epoch {peak}")

    def _change(self) -> float:
        old, new = self.thetas[-2:]
        return abs(new - old) / abs(old) if old else 0.0

    def _limit(self, found: Finding | None) -> Finding | None:
        low, high, n = self.settings.low, self.settings.high, len(self.thetas)
        if found is None:
            if high is None or n < high:
                return None
            return Finding(high, f"theta has not settled by epoch {n}, the largest interval")
        interval = max(low, found.interval if high is None else min(high, found.interval))
        if interval == found.interval:
            return found
        bound = "smallest" if interval == low else "largest"
        return Finding(interval, f"{found.reason}; {interval} is the {bound} interval allowed")


def noise_scale(small_square: float, small: float, large_square: float, large: float) -> float:
    """Estimate tr(Sigma) / |G|^2 from the norms of gradients over two batch sizes.

    E|g_B|^2 = |G|^2 + tr(Sigma) / B, so two batch sizes give two equations. Take means over many
    steps for the squares: the ratio of two noisy numbers is biased.

    Args:
        small_square: Mean of |g|^2 over batches of `small` samples.
        small: Samples.
        large_square: The same over batches of `large` samples.
        large: Samples, more than `small`.

    Returns:
        The noise scale in samples: 0 where the norms show no noise, infinity where they show
        nothing but noise, NaN where they are not finite.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training (2018), appendix A.1.
    """
    signal = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1.0 / small - 1.0 / large)
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise <= 0:
        return 0.0
    return noise / signal if signal > 0 else math.inf
