"""Decide when the batch size and the learning rate change: [T] algorithm 3.

Pure decisions from averaged numbers: every rank feeds in the same, and decides the same.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from tfscale.config import ConfigError
from tfscale.measure.theta import IntervalFinder, IntervalRule, theta_of

RateRule = Literal["linear", "sqrt", "none"]
Signal = Literal["theta", "noise_scale"]
RATE_RULES: tuple[RateRule, ...] = ("linear", "sqrt", "none")
SIGNALS: tuple[Signal, ...] = ("theta", "noise_scale")


@dataclass(frozen=True)
class GrowthSettings:
    """The choices of a run.

    Attributes:
        sizes: Batch sizes over all ranks, ascending; the first is the start, the last the maximum.
        learning_rate_rule: The rate grows with the batch by the same factor ("linear"), by its
            square root ("sqrt") or not at all ("none").
        signal: "theta" grows every interval, "noise_scale" whenever the gradient noise scale
            reaches the next batch size, at most once per interval.
        interval: Epochs from one growth to the next; None reads it off theta.
        rule: How it is read off.
        saturation: Relative fall of the training cost below which it counts as saturated; None
            for no decay by saturation.
        window: Epochs whose mean cost is compared with the mean of as many epochs before them.
        decay: Factor of a decay of the rate, in (0, 1].
        decay_epochs: Epochs, as Keras counts from 0, with which decays begin; any given switches
            `saturation` off.
        warmup_epochs: Epochs at the beginning that do not count.
    """

    sizes: tuple[int, ...]
    learning_rate_rule: RateRule = "linear"
    signal: Signal = "theta"
    interval: int | None = None
    rule: IntervalRule = dataclasses.field(default_factory=IntervalRule)
    saturation: float | None = 0.01
    window: int = 3
    decay: float = 0.1
    decay_epochs: tuple[int, ...] = ()
    warmup_epochs: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: A value is outside its range.
        """
        checks = (
            ("learning_rate_rule", RATE_RULES, self.learning_rate_rule in RATE_RULES),
            ("signal", SIGNALS, self.signal in SIGNALS),
            ("interval", "at least 1 epoch, or None", self.interval is None or self.interval >= 1),
            ("saturation", "0 or more, or None", self.saturation is None or self.saturation >= 0),
            ("window", "at least 1 epoch", self.window >= 1),
            ("decay", "greater than 0 and at most 1", 0 < self.decay <= 1),
            ("decay_epochs", "ascending", list(self.decay_epochs) == sorted(self.decay_epochs)),
            ("warmup_epochs", "0 or more", self.warmup_epochs >= 0),
        )
        for name, wanted, is_right in checks:
            if not is_right:
                wanted = f"one of {wanted}" if isinstance(wanted, tuple) else wanted
                raise ConfigError(
                    f"{name} must be {wanted}. Received: {name}={getattr(self, name)!r}. "
                    "Leave it out for the default."
                )


def ladder(start: int, maximum: int, factor: float) -> tuple[int, ...]:
    """Return the batch sizes from start to maximum, each `factor` times the one before.

    Args:
        start: Samples over all ranks.
        maximum: At least `start`; the last size, even if the last factor is smaller for it.
        factor: Greater than 1.

    Returns:
        Ascending sizes, rounded down to whole samples.

    Raises:
        ConfigError: The factor or the order does not fit.
    """
    if not factor > 1:
        raise ConfigError(f"factor must be greater than 1. Received: factor={factor!r}. Use 2.")
    if start > maximum:
        raise ConfigError(
            "The batch grows from start_batch_size to max_batch_size. Received: "
            f"start_batch_size={start}, max_batch_size={maximum}. Give GlobalBatches a smaller "
            "batch_size, or pass start_batch_size."
        )
    sizes = [start]
    while sizes[-1] < maximum:
        grown = max(int(sizes[-1] * factor), sizes[-1] + 1)
        sizes.append(min(grown, maximum))
    return tuple(sizes)


def with_largest_interval(settings: GrowthSettings, epochs: int | None) -> GrowthSettings:
    """Limit the interval so that three fifths of the epochs are left for the largest batch.

    Args:
        settings: What was chosen.
        epochs: Planned, the warm-up included; None if not known.

    Returns:
        Settings whose rule has a largest interval, at least 1.
    """
    n_growths = len(settings.sizes) - 1
    if epochs is None or not n_growths:
        return settings
    high = max(1, 2 * (epochs - settings.warmup_epochs) // (5 * n_growths))
    return dataclasses.replace(settings, rule=dataclasses.replace(settings.rule, high=high))


@dataclass(frozen=True)
class Measures:
    """An epoch, averaged over all ranks.

    Attributes:
        first_cost: Loss of the first global batch of the run, or of its first execution.
        cost: Mean loss of the epoch.
        distance: ||w_0 - w|| at its end.
        noise_scale: In samples; NaN where it was not measured.
        fits: Whether the next size is expected to fit into every rank's memory.
    """

    first_cost: float
    cost: float
    distance: float
    noise_scale: float = math.nan
    fits: bool = True


@dataclass(frozen=True)
class Decision:
    """Batch size and rate from the next epoch on.

    Attributes:
        batch_size: Samples over all ranks.
        rate_scale: Learning rate relative to the initial one.
        theta: Of the epoch that ended.
        interval: Epochs from one growth to the next; None while it is not known.
        reasons: What changes, and why; empty if nothing does.
    """

    batch_size: int
    rate_scale: float
    theta: float
    interval: int | None
    reasons: tuple[str, ...] = ()


class GrowthControl:
    """Algorithm 3 and the learning rate control around it, one decision per epoch.

    Epochs n count from 1, the first one after the warm-up. With interval K the batch grows at the
    end of epoch max(K, the epoch in which K was found) and every K epochs after it. Growth ends at
    the largest size, where memory does not suffice, or with the first decay of the rate.

    Args:
        settings: What the run chose.

    Source: [T] 5.1.4 (algorithm 3), 5.1.5.
    """

    def __init__(self, settings: GrowthSettings) -> None:
        self.settings = settings
        self._finder = IntervalFinder(settings.rule)
        self._level = 0  # index of the present size
        self._rate_scale = 1.0
        self._interval = settings.interval
        self._counted_from = 0  # epoch n from which intervals are counted
        self._n_decays = 0
        self._costs: list[float] = []  # of the last epochs without a change
        self._has_stopped = False  # growing, for good
        self._first_epoch: int | None = None

    @property
    def batch_size(self) -> int:
        """The present size."""
        return self.settings.sizes[self._level]

    @property
    def rate_scale(self) -> float:
        """The present learning rate relative to the initial one."""
        return self._rate_scale

    @property
    def next_size(self) -> int | None:
        """The size that comes next; None where the batch will not grow any more."""
        is_last = self._level + 1 == len(self.settings.sizes)
        return None if is_last or self._has_stopped else self.settings.sizes[self._level + 1]

    def end_epoch(self, epoch: int, measures: Measures) -> Decision:
        """Decide what changes with the next epoch.

        Args:
            epoch: As Keras counts, from 0; the first call tells where the run began.
            measures: Of this epoch; the same on all ranks, as is the decision.
        """
        if self._first_epoch is None:
            self._first_epoch = epoch
        n = epoch - self._first_epoch + 1 - self.settings.warmup_epochs
        theta = theta_of(measures.first_cost, measures.cost, measures.distance)
        reasons: list[str] = []
        if n >= 1:
            self._costs = [*self._costs, measures.cost][-2 * self.settings.window :]
            reasons += self._look_for_interval(n, theta)
            reasons += self._decay(epoch) or self._grow(n, measures)
        return Decision(self.batch_size, self._rate_scale, theta, self._interval, tuple(reasons))

    def _look_for_interval(self, n: int, theta: float) -> list[str]:
        if self._interval is not None or self.settings.signal != "theta":
            return []
        finding = self._finder.observe(theta)
        if finding is None:
            return []
        self._interval = finding.interval
        self._counted_from = n if n >= finding.interval else 0
        return [f"the batch grows every {finding.interval} epochs: {finding.reason}"]

    def _grow(self, n: int, measures: Measures) -> list[str]:
        size, why = self.next_size, self._due(n, measures)
        if size is None or not why:
            return []
        if not measures.fits:
            self._has_stopped = True
            return [f"the batch stays at {self.batch_size}: {size} is not expected to fit memory"]
        ratio = size / self.batch_size
        by = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
        by_rule = by[self.settings.learning_rate_rule]
        text = f"batch {self.batch_size} -> {size}, learning rate times {by_rule:g}: {why}"
        self._level += 1
        self._rate_scale *= by_rule
        self._costs = []
        return [text]

    def _due(self, n: int, measures: Measures) -> str:
        """Return why the batch grows now; empty if it does not."""
        passed = n - self._counted_from
        if self.settings.signal == "noise_scale":
            if passed < (self._interval or 1) or not measures.noise_scale >= (self.next_size or 0):
                return ""
            self._counted_from = n
            return f"the gradient noise scale is {measures.noise_scale:.4g} samples"
        if self._interval is None or passed % self._interval:
            return ""
        return f"end of epoch {n}, interval {self._interval}"

    def _decay(self, epoch: int) -> list[str]:
        why = self._decay_due(epoch)
        if not why:
            return []
        before = self._rate_scale
        self._rate_scale = (before if self._n_decays else 1.0) * self.settings.decay
        self._n_decays += 1
        self._costs = []
        text = f"learning rate times {self._rate_scale / before:g}: {why}"
        if self.next_size is not None:
            self._has_stopped = True
            text += f"; the batch stays at {self.batch_size}"
        return [text]

    def _decay_due(self, epoch: int) -> str:
        """Return why the rate decays now; empty if it does not."""
        settings = self.settings
        if settings.decay_epochs:
            return f"epoch {epoch + 1} is due" if epoch + 1 in settings.decay_epochs else ""
        window = settings.window
        if settings.saturation is None or self.next_size is not None:
            return ""
        if len(self._costs) < 2 * window or not all(map(math.isfinite, self._costs)):
            return ""
        before, now = sum(self._costs[:window]) / window, sum(self._costs[window:]) / window
        if before - now >= settings.saturation * abs(before):
            return ""
        return f"the training cost is saturated ({before:.4g} -> {now:.4g} in {window} epochs)"

    def state(self) -> dict[str, Any]:
        """Return what decides all later epochs, for `restore`; JSON can hold it."""
        values = {name: vars(self)[f"_{name}"] for name in _STATE}
        return {**values, "thetas": list(self._finder.thetas), "sizes": list(self.settings.sizes)}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken.

        Raises:
            ConfigError: The batch sizes of that run were others.
        """
        if list(state["sizes"]) != list(self.settings.sizes):
            raise ConfigError(
                "A run goes on with the batch sizes it began with. Received: "
                f"{list(self.settings.sizes)}; the backup has {list(state['sizes'])}. Pass the "
                "same arguments, or remove the backup to start again."
            )
        vars(self).update({f"_{name}": state[name] for name in _STATE})
        self._finder.thetas = [float(theta) for theta in state["thetas"]]


_STATE = (
    *("level", "rate_scale", "interval", "counted_from", "n_decays", "costs"),
    *("has_stopped", "first_epoch"),
)
