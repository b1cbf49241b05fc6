"""What a run with growing batches may choose: checked settings, no TensorFlow, no MPI."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from tfscale.errors import ConfigError
from tfscale.tuning.theta import IntervalRule

RateRule = Literal["linear", "sqrt", "none"]
Signal = Literal["theta", "noise_scale"]
RATE_RULES: tuple[RateRule, ...] = ("linear", "sqrt", "none")
SIGNALS: tuple[Signal, ...] = ("theta", "noise_scale")


@dataclass(frozen=True)
class GrowthSettings:
    """What a run may choose.

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
        epochs: Planned, the warm-up included; None if nobody knows.

    Returns:
        Settings whose rule has a largest interval, at least 1.
    """
    n_growths = len(settings.sizes) - 1
    if epochs is None or not n_growths:
        return settings
    high = max(1, 2 * (epochs - settings.warmup_epochs) // (5 * n_growths))
    return dataclasses.replace(settings, rule=dataclasses.replace(settings.rule, high=high))
