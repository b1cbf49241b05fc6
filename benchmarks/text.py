"""Numbers and tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.numbers import paired_ratio, spread
from benchmarks.rows import Row


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    body = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in body) + "\n"


def milliseconds(seconds: Sequence[float]) -> str:
    """Return median and quartiles as text."""
    found = spread(seconds)
    middle, low, high = map(_three_digits, (found.median, found.low, found.high))
    return f"{middle} ({low}..{high})"


def _three_digits(seconds: float) -> str:
    """Return milliseconds with three digits, or all those before the point."""
    return f"{1e3 * seconds:.{3 if seconds < 1 else 0}{'g' if seconds < 1 else 'f'}}"


def ratio_text(row: Row, baseline: str, ours: str) -> str:
    """Return how many times faster ours is, with the interval; a dash where one is missing."""
    if baseline not in row.rounds or ours not in row.rounds:
        return "—"
    middle, low, high = paired_ratio(row.rounds[baseline], row.rounds[ours])
    n_pairs = min(len(row.rounds[baseline]), len(row.rounds[ours]))
    interval = f" ({low:.2f}..{high:.2f})" if n_pairs > 1 else ""
    return f"{middle:.2f}{interval}"
