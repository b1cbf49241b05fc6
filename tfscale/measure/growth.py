"""Decide when the batch size and the learning rate change: [T] algorithm 3.

The decisions depend only on numbers averaged over ranks, so all ranks decide alike.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tfscale.config import ConfigError, require

Rule = Literal["robust", "thesis", "peak", "seesaw"]
RateRule = Literal["linear", "sqrt", "none"]
Signal = Literal["theta", "noise_scale"]
_RULES: tuple[Rule, ...] = ("robust", "thesis", "peak", "seesaw")
# The factor of the learning rate, from that of the batch size.
RATE_RULES: dict[RateRule, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda ratio: 1.0,
}
_SIGNALS: tuple[Signal, ...] = ("theta", "noise_scale")


def _check(settings: Any, *checks: tuple[str, str, bool]) -> None:
    """Raise a ConfigError for the first setting whose check is not fulfilled."""
    for name, wanted, fits in checks:
        require(fits, name, wanted, vars(settings)[name], "Leave it out for the default.")


# The signals: theta and the gradient noise scale


def theta_of(first_cost: float, cost: float, distance: float) -> float:
    """Return theta = (F(w_0) - F(w_i)) / ||w_0 - w_i||, [T] eq. 5.4; NaN if it is not finite."""
    if not distance > 0:
        return math.nan
    theta = (first_cost - cost) / distance
    return theta if math.isfinite(theta) else math.nan


def noise_scale(small_square: float, small: float, large_square: float, large: float) -> float:
    """Estimate tr(Sigma) / |G|^2 from the norms of gradients over two batch sizes.

    E|g_B|^2 = |G|^2 + tr(Sigma) / B, so two batch sizes give two equations. The squares are means
    of |g|^2 over many batches of `small` or `large` samples: the ratio of two noisy numbers is
    biased. Returns samples: 0 if the norms show no noise, infinity if they show only noise, NaN if
    they are not finite.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training (2018), appendix A.1.
    """
    signal = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1.0 / small - 1.0 / large)
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise <= 0:
        return 0.0
    return noise / signal if signal > 0 else math.inf


# The interval, read off the curve of theta

_CONFIRMATIONS = 2  # changes that must be small in a row; epochs below the peak in a row


@dataclass(frozen=True)
class IntervalRule:
    """Rule that reads an interval off the curve of theta.

    Epochs n are counted from 1, which is the first epoch after the warm-up. "thesis" is algorithm 3
    as published: K = n at the first n >= 2 where |theta_n - theta_(n-1)| <= tolerance *
    |theta_(n-1)|. "robust" requires two such changes in a row, n >= 3, with finite and positive
    theta in these epochs. "peak" takes the epoch of the largest theta, once two epochs in a row lie
    below it. `low` and `high` limit the interval of the latter two; if none was found by epoch
    `high`, the interval is `high`. "seesaw" reads none: the batch grows where the rate decays.

    Source: [T] algorithm 3; "peak": [T] 5.4, where the published intervals were read off figures;
    "seesaw": Meterez et al. (2025), arXiv 2510.14717.
    """

    rule: Rule = "robust"
    tolerance: float = 0.10
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        is_ordered = self.high is None or self.high >= self.low
        _check(
            self,
            ("rule", f"one of {_RULES}", self.rule in _RULES),
            ("tolerance", "a relative change greater than 0", self.tolerance > 0),
            ("low", "an interval of at least 1 epoch", self.low >= 1),
            ("high", f"an interval of at least low={self.low} epochs", is_ordered),
        )


class Finding(NamedTuple):
    """An interval in epochs, and the reason for it."""

    interval: int
    reason: str


def find_interval(thetas: Sequence[float], rule: IntervalRule, n_before: int = 0) -> Finding | None:
    """Return the interval if it is found with the last of the `thetas` of all epochs so far.

    `n_before` is the number of epochs before the first of them. Reasons count epochs with these,
    from 1, as Keras prints them.
    """
    if rule.rule == "thesis":
        return _find_unchanged(thetas, rule.tolerance, 1, n_before)
    if rule.rule == "peak":
        peak = _find_peak(thetas, n_before)
    else:
        are_usable = all(map(_is_usable, thetas[-1 - _CONFIRMATIONS :]))
        peak = None
        if are_usable:
            peak = _find_unchanged(thetas, rule.tolerance, _CONFIRMATIONS, n_before)
    n, low, high = len(thetas), rule.low, rule.high
    if peak is None:
        if high is None or n < high:
            return None
        text = (
            f"theta still changes in epoch {n_before + n}; {high} is the largest interval allowed"
        )
        return Finding(high, text)
    interval = max(low, peak.interval if high is None else min(high, peak.interval))
    if interval == peak.interval:
        return peak
    bound = "smallest" if interval == low else "largest"
    return Finding(interval, f"{peak.reason}; {interval} is the {bound} interval allowed")


def _is_usable(theta: float) -> bool:
    return math.isfinite(theta) and theta > 0


def _find_unchanged(
    thetas: Sequence[float], tolerance: float, n_changes: int, n_before: int
) -> Finding | None:
    """Return the last epoch if the last `n_changes` changes are small."""
    pairs = list(itertools.pairwise(thetas))[-n_changes:]
    if len(pairs) < n_changes or not all(abs(b - a) <= tolerance * abs(a) for a, b in pairs):
        return None
    old, new = pairs[-1]
    n, change = len(thetas), abs(new - old) / abs(old) if old else 0.0
    where = f"in epoch {n_before + n}"
    if n_changes == 1:
        return Finding(n, f"theta changed by {change:.1%} {where}")
    text = f"theta changed by at most {tolerance:.0%} in each of the last {n_changes} epochs"
    return Finding(n, f"{text} ({change:.1%} {where})")


def _find_peak(thetas: Sequence[float], n_before: int) -> Finding | None:
    usable = [theta if _is_usable(theta) else -math.inf for theta in thetas]
    best = max(usable)
    peak = usable.index(best) + 1
    if best == -math.inf or len(usable) - peak < _CONFIRMATIONS:
        return None
    return Finding(peak, f"theta peaked at {best:.4g} in epoch {n_before + peak}")


# The decisions


@dataclass(frozen=True)
class GrowthSettings:
    """The growth of the batch in a run: arguments of `AdaptiveBatchSize`."""

    sizes: tuple[int, ...]  # over all ranks, ascending: from the start to the maximum
    learning_rate_rule: RateRule = "linear"
    signal: Signal = "theta"
    interval: int | None = None  # epochs from one growth to the next; None reads it off theta
    rule: IntervalRule = field(default_factory=IntervalRule)
    saturation: float | None = 0.01  # relative fall of the cost; None for no decay by saturation
    window: int = 3  # epochs whose mean cost is compared with that of as many before them
    decay: float = 0.1
    decay_epochs: tuple[int, ...] = ()  # from 0; any given switches `saturation` off
    warmup_epochs: int = 0
    factor: float = 2.0  # of a growth; "seesaw" divides the rate by it in each of `decay_epochs`

    @property
    def is_seesaw(self) -> bool:
        """True if the batch grows in the epochs in which the rate decays, and takes its half."""
        return self.rule.rule == "seesaw"

    def __post_init__(self) -> None:
        rate_rules = tuple(RATE_RULES)
        if self.is_seesaw and (
            not self.decay_epochs or self.interval is not None or self.signal != "theta"
        ):
            raise ConfigError(
                "rule='seesaw' needs decay_epochs, and no other reason to grow. Received: "
                f"decay_epochs={self.decay_epochs}, interval={self.interval}, "
                f"signal={self.signal!r}. Pass the epochs in which a schedule would halve the rate."
            )
        _check(
            self,
            ("learning_rate_rule", f"one of {rate_rules}", self.learning_rate_rule in rate_rules),
            ("signal", f"one of {_SIGNALS}", self.signal in _SIGNALS),
            ("interval", "at least 1 epoch, or None", self.interval is None or self.interval >= 1),
            ("saturation", "0 or more, or None", self.saturation is None or self.saturation >= 0),
            ("window", "at least 1 epoch", self.window >= 1),
            ("decay", "greater than 0 and at most 1", 0 < self.decay <= 1),
            ("decay_epochs", "ascending", list(self.decay_epochs) == sorted(self.decay_epochs)),
            ("warmup_epochs", "0 or more", self.warmup_epochs >= 0),
        )


def ladder(start: int, maximum: int, factor: float) -> tuple[int, ...]:
    """Return the batch sizes from start to maximum, each `factor` times the one before.

    They are rounded down to whole samples, and the last factor may be smaller.
    """
    require(factor > 1, "factor", "greater than 1", factor, "Use 2.")
    if start > maximum:
        raise ConfigError(
            "start_batch_size must not exceed max_batch_size. Received: "
            f"start_batch_size={start}, max_batch_size={maximum}. Give GlobalBatches a smaller "
            "batch_size, or pass start_batch_size."
        )
    sizes = [start]
    while sizes[-1] < maximum:
        grown = max(int(sizes[-1] * factor), sizes[-1] + 1)
        sizes.append(min(grown, maximum))
    return tuple(sizes)


@dataclass(frozen=True)
class Measures:
    """Measurements of an epoch, averaged over all ranks."""

    first_cost: float  # loss of the first global batch of the run, or of its first execution
    cost: float  # mean loss of the epoch
    distance: float  # ||w_0 - w|| at its end
    noise_scale: float = math.nan  # in samples; NaN if not measured
    gradient_norm: float = math.nan  # root of the mean square over steps; NaN if not measured
    fits: bool = True  # whether the next size is expected to fit into every rank's memory


@dataclass(frozen=True)
class Decision:
    """Batch size and learning rate from the next epoch on."""

    batch_size: int  # samples over all ranks
    rate_scale: float  # learning rate relative to the initial one
    theta: float  # of the epoch that ended
    interval: int | None  # epochs from one growth to the next; None while it is not known
    reasons: tuple[str, ...] = ()  # a text for each change; empty without changes


@dataclass(eq=False)
class GrowthControl:
    """Algorithm 3 with its control of the learning rate, one decision per epoch.

    Epochs n are counted from 1, the first one after the warm-up. With interval K the batch grows at
    the end of epoch max(K, the epoch in which K was found) and every K epochs after it. Growth ends
    at the largest size, if memory does not suffice, or with the first decay of the learning rate.

    Source: [T] 5.1.4 (algorithm 3), 5.1.5.
    """

    settings: GrowthSettings
    level: int = 0  # index of the present size
    rate_scale: float = 1.0  # the present learning rate relative to the initial one
    interval: int | None = None
    counted_from: int = 0  # epoch n from which intervals are counted
    n_decays: int = 0
    thetas: list[float] = field(default_factory=list)  # of all epochs until the interval was found
    costs: list[float] = field(default_factory=list)  # of the last epochs without a change
    has_stopped: bool = False  # growing; it does not resume
    first_epoch: int | None = None

    def __post_init__(self) -> None:
        self.interval = self.settings.interval

    @property
    def batch_size(self) -> int:
        """The present size."""
        return self.settings.sizes[self.level]

    @property
    def next_size(self) -> int | None:
        """The next batch size; None if the batch will not grow any more."""
        is_last = self.level + 1 == len(self.settings.sizes)
        return None if is_last or self.has_stopped else self.settings.sizes[self.level + 1]

    def end_epoch(self, epoch: int, measures: Measures) -> Decision:
        """Decide batch size and learning rate for the next epoch.

        `epoch` is Keras's number, from 0; the first call is in the first epoch of the run. The
        measures are equal on all ranks.
        """
        if self.first_epoch is None:
            self.first_epoch = epoch
        n_before = self.first_epoch + self.settings.warmup_epochs
        n = epoch + 1 - n_before
        theta = theta_of(measures.first_cost, measures.cost, measures.distance)
        reasons: list[str] = []
        if n >= 1:
            self.costs = [*self.costs, measures.cost][-2 * self.settings.window :]
            if self.settings.is_seesaw:
                reasons += self._grow_by_decay(epoch, measures)
            else:
                reasons += self._look_for_interval(n, theta, n_before)
                reasons += self._decay(epoch) or self._grow(n, measures)
        return Decision(self.batch_size, self.rate_scale, theta, self.interval, tuple(reasons))

    def _look_for_interval(self, n: int, theta: float, n_before: int) -> list[str]:
        if self.interval is not None or self.settings.signal != "theta":
            return []
        self.thetas.append(theta)
        finding = find_interval(self.thetas, self.settings.rule, n_before)
        if finding is None:
            return []
        self.interval = finding.interval
        self.counted_from = n if n >= finding.interval else 0
        return [f"the batch grows every {finding.interval} epochs: {finding.reason}"]

    def _grow(self, n: int, measures: Measures) -> list[str]:
        size, why = self.next_size, self._why_grow(n, measures)
        if size is None or not why:
            return []
        if self.settings.signal == "noise_scale":
            self.counted_from = n
        if not measures.fits:
            self.has_stopped = True
            return [f"the batch stays at {self.batch_size}: {size} is not expected to fit memory"]
        by_rule = RATE_RULES[self.settings.learning_rate_rule](size / self.batch_size)
        text = f"batch {self.batch_size} -> {size}, learning rate times {by_rule:g}: {why}"
        self.level += 1
        self.rate_scale *= by_rule
        self.costs = []
        return [text]

    def _why_grow(self, n: int, measures: Measures) -> str:
        """Return the reason if the batch grows after `n` epochs, else an empty text."""
        passed = n - self.counted_from
        if self.settings.signal == "noise_scale":
            is_large = measures.noise_scale >= (self.next_size or 0)  # not if it is NaN
            if passed < (self.interval or 1) or not is_large:
                return ""
            return f"the gradient noise scale is {measures.noise_scale:.4g} samples"
        if self.interval is None or passed % self.interval:
            return ""
        return f"the interval is {self.interval} epoch{'s' if self.interval > 1 else ''}"

    def _grow_by_decay(self, epoch: int, measures: Measures) -> list[str]:
        """Double the batch and divide the rate by sqrt(2) where a schedule would halve the rate.

        In general the rate is divided by the factor of growths, and multiplied by the root of this
        growth: of the last, smaller one, or of none.
        """
        why, size = self._decay_due(epoch), self.next_size
        if not why:
            return []
        text = f"the batch stays at {self.batch_size}"
        if size is not None and not measures.fits:
            self.has_stopped = True
            text += f": {size} is not expected to fit memory"
        before = self.batch_size
        if self.next_size is not None:
            self.level += 1
            text = f"batch {before} -> {self.batch_size}"
        by_rule = math.sqrt(self.batch_size / before) / self.settings.factor
        self.rate_scale *= by_rule
        self.n_decays += 1
        self.costs = []
        return [f"{text}, learning rate times {by_rule:g}: {why}"]

    def _decay(self, epoch: int) -> list[str]:
        why = self._decay_due(epoch)
        if not why:
            return []
        before = self.rate_scale
        self.rate_scale = (before if self.n_decays else 1.0) * self.settings.decay
        self.n_decays += 1
        self.costs = []
        text = f"learning rate times {self.rate_scale / before:g}: {why}"
        if self.next_size is not None:
            self.has_stopped = True
            text += f"; the batch stays at {self.batch_size}"
        return [text]

    def _decay_due(self, epoch: int) -> str:
        """Return the reason if the learning rate decays now, else an empty text."""
        settings = self.settings
        if settings.decay_epochs:
            if epoch + 1 not in settings.decay_epochs:
                return ""
            return f"decay_epochs has {epoch + 1}, which Keras prints as epoch {epoch + 2}"
        window = settings.window
        if settings.saturation is None or self.next_size is not None:
            return ""
        if len(self.costs) < 2 * window or not all(map(math.isfinite, self.costs)):
            return ""
        before, now = sum(self.costs[:window]) / window, sum(self.costs[window:]) / window
        if before - now >= settings.saturation * abs(before):
            return ""
        return f"the training cost is saturated ({before:.4g} -> {now:.4g} in {window} epochs)"

    def state(self) -> dict[str, Any]:
        """Return the state that determines all later decisions, for `restore`; JSON."""
        values = dataclasses.asdict(self)
        return values | {"sizes": list(values.pop("settings")["sizes"])}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken."""
        if list(state["sizes"]) != list(self.settings.sizes):
            raise ConfigError(
                "batch sizes must be those of the backup. Received: "
                f"{list(self.settings.sizes)}; the backup has {list(state['sizes'])}. Pass the "
                "same arguments, or remove the backup to start again."
            )
        for name in vars(self).keys() - {"settings"}:
            setattr(self, name, copy.deepcopy(state[name]))
