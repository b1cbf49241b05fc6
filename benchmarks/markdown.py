"""Numbers and tables as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.numbers import Ratio, paired_ratio, spread
from benchmarks.rows import Row


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    body = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in body) + "\n"


def milliseconds(seconds: Sequence[float]) -> str:
    """Return median and quartiles as text."""
    found = spread(seconds)
    middle, low, high = map(three_digits, (found.median, found.low, found.high))
    return f"{middle} ({low}..{high})"


def three_digits(seconds: float) -> str:
    """Return milliseconds with three digits, or all those before the point."""
    text = f"{1e3 * seconds:.3g}"
    return text if float(text) < 1000 else f"{1e3 * seconds:.0f}"


def megabytes(row: Row, systems: Sequence[str]) -> str:
    """Return the bytes that the link of a host sent per call by system; nothing in memory."""
    sent = {s: statistics.median(row.sent_bytes[s]) / 1e6 for s in systems if s in row.sent_bytes}
    if len(systems) == 1:
        return "".join(f"{found:.3g}" for found in sent.values())
    return ", ".join(f"{system} {found:.3g}" for system, found in sent.items())


def ratio_of(row: Row, baseline: str, ours: str) -> Ratio | None:
    """Return how many times faster ours is; None where they have no round in common."""
    return paired_ratio(row.rounds.get(baseline, {}), row.rounds.get(ours, {}))


def ratio_text(row: Row, baseline: str, ours: str) -> str:
    """Return how many times faster ours is, with the interval; a dash where that is unknown."""
    ratio = ratio_of(row, baseline, ours)
    return "—" if ratio is None else f"{ratio.median:.2f}{interval(ratio, '{:.2f}'.format)}"


def interval(ratio: Ratio, show: Callable[[float], str]) -> str:
    """Return the ends in brackets, with what they are; nothing for one round."""
    if ratio.n == 1:
        return ""
    name = f"range of {ratio.n}: " if ratio.is_range else ""
    return f" ({name}{show(ratio.low)}..{show(ratio.high)})"
