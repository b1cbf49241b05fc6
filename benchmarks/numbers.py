"""Medians, spread, paired intervals and limits, as pure functions."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Turn = TypeVar("Turn")

# Bootstrapped over fewer rounds, an interval would be the range and cover much less than it says.
_LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Spread:
    """Quartiles of durations in seconds, and how many there are."""

    median: float
    low: float
    high: float
    n: int


def spread(seconds: Sequence[float]) -> Spread:
    """Return median and quartiles; with fewer than four values the extremes stand for these."""
    ordered = sorted(seconds)
    if len(ordered) < 4:
        return Spread(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(middle, low, high, len(ordered))


@dataclass(frozen=True)
class Ratio:
    """Ratio of two speeds.

    Attributes:
        median: Over rounds, of the ratio of medians.
        low, high: Ends of the bootstrap interval over rounds, or of the range.
        n: Number of rounds.
        is_range: There are too few rounds for an interval.
    """

    median: float
    low: float
    high: float
    n: int
    is_range: bool


def paired_ratio(
    baseline: Mapping[Turn, Sequence[float]],
    ours: Mapping[Turn, Sequence[float]],
    level: float = 0.9,
) -> Ratio | None:
    """Return how many times faster ours is, over the rounds that both have.

    Args:
        baseline: Durations by round.
        ours: The same for the other system; it ran right before or after `baseline` in a round.
        level: Probability that the interval shall hold, in (0, 1).

    Returns:
        None where no round has both.
    """
    common = [turn for turn in baseline if turn in ours]
    ratios = [statistics.median(baseline[turn]) / statistics.median(ours[turn]) for turn in common]
    if not ratios:
        return None
    if len(ratios) < _LEAST_ROUNDS:
        return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios), True)
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000)
    )
    cut = int((1 - level) / 2 * len(medians))
    return Ratio(statistics.median(ratios), medians[cut], medians[-1 - cut], len(ratios), False)


@dataclass(frozen=True)
class Weights:
    """The trainable variables of one layer.

    Attributes:
        n_parameters: All of them.
        n_in, n_out: Of a dense layer's kernel; 0 for any other layer.
    """

    n_parameters: int
    n_in: int = 0
    n_out: int = 0


def allreduce_bytes(layers: Sequence[Weights], n_hosts: int) -> float:
    """Return the bytes that each host sends at least to sum up all gradients in float32."""
    return 2 * (n_hosts - 1) / n_hosts * 4 * sum(layer.n_parameters for layer in layers)


def least_bytes(layers: Sequence[Weights], n_hosts: int, local_batch: int) -> float:
    """Return the bytes that each host sends at least if dense layers may do it another way.

    A dense layer's gradient is (activations)^T (output gradients), so hosts may instead gather
    both from each other: (n - 1) (n_in + n_out) numbers per picture. The cheaper way counts, layer
    by layer.

    Args:
        layers: Of the model.
        n_hosts: Number of hosts.
        local_batch: Pictures per host and step.
    """
    total = 0.0
    for layer in layers:
        reduced = allreduce_bytes([layer], n_hosts)
        gathered = 4.0 * (n_hosts - 1) * local_batch * (layer.n_in + layer.n_out)
        total += min(reduced, gathered) if layer.n_in else reduced
    return total


def physical_limit(compute_s: float, sent_bytes: float, rate_bits_s: float | None) -> float:
    """Return the shortest step in seconds: everything that can overlap does.

    Args:
        compute_s: Step without any exchange.
        sent_bytes: Sent by each host.
        rate_bits_s: Of its link; None for shared memory, which sets no limit here.
    """
    return compute_s if rate_bits_s is None else max(compute_s, 8 * sent_bytes / rate_bits_s)
