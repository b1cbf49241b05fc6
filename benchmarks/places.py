"""Places of ranks: the memory of one machine, or emulated hosts with links of a rate.

"memory" is one host without links, "1gbit" one rank on each host, "2x4@1gbit" two hosts with four
ranks each, and "1x4@memory" four ranks in memory. At "sleep-4x1@1gbit" layers sleep instead of
computing, each rank on a core of its own; at "sleep8-4x1@1gbit" on one eight times as fast. At
"4x1@10mbit+100ms" packets between two hosts take 100 ms there and back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.cluster.layout import parse_rate

MEMORY = "memory"
# The environment variable with the factor of all times where layers sleep.
SLOW_MOTION = "BENCH_SLOW_MOTION"


@dataclass(frozen=True)
class Place:
    """Ranks and their links.

    Attributes:
        n_hosts: Hosts, each with a link of its own; 1 in memory.
        n_ranks: Ranks of all hosts together, as many on each.
        rate_bits_s: Of a link in each direction; None in memory.
        sleep_speed: How many times as fast as the core of `benchmarks.layer_times` that of each
            rank is, whose layers sleep; None where layers compute.
        rtt_ms: Round trip between two hosts, besides that of this machine.
    """

    n_hosts: int
    n_ranks: int
    rate_bits_s: float | None
    sleep_speed: float | None = None
    rtt_ms: float = 0.0


def parse_place(text: str, n_ranks: int = 4) -> Place:
    """Read a place.

    Args:
        text: Such as "memory", "1gbit", "2x4@1gbit", "sleep-4x1@1gbit" or "10mbit+100ms".
        n_ranks: Where the text does not say it.

    Raises:
        ValueError: It is neither of these.
    """
    asleep = re.match(r"sleep(\d+(?:\.\d+)?)?-", text)
    found = re.fullmatch(
        r"(?:([1-9]\d*)x([1-9]\d*)@)?([^@+\s]+)(?:\+(\d+)ms)?",
        text[asleep.end() if asleep else 0 :],
    )
    if found is None:
        raise ValueError(_error(text))
    default = (1, n_ranks) if found[3] == MEMORY else (n_ranks, 1)
    n_hosts, per_host = (int(found[1]), int(found[2])) if found[1] else default
    if found[3] == MEMORY and (n_hosts > 1 or found[4]):
        raise ValueError(_error(text))
    rate = None if found[3] == MEMORY else parse_rate(found[3])
    speed = float(asleep[1] or 1) if asleep else None
    return Place(n_hosts, n_hosts * per_host, rate, speed, float(found[4] or 0))


def _error(text: str) -> str:
    return (
        "A place is memory, a rate, or hosts x ranks @ one of these, with one host in memory; "
        "sleep- may come before it, and +100ms, a round trip, after a rate. "
        f"Received: {text!r}. Example: --places 2x4@1gbit"
    )
