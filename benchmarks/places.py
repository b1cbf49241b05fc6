"""Places of ranks: the memory of one machine, or emulated hosts with links of a rate.

"memory" is one host without links, "1gbit" one rank on each host, "2x4@1gbit" two hosts with four
ranks each, and "1x4@memory" four ranks in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.cluster.layout import parse_rate

MEMORY = "memory"


@dataclass(frozen=True)
class Place:
    """Ranks and their links.

    Attributes:
        n_hosts: Hosts, each with a link of its own; 1 in memory.
        n_ranks: Ranks of all hosts together, as many on each.
        rate_bits_s: Of a link in each direction; None in memory.
    """

    n_hosts: int
    n_ranks: int
    rate_bits_s: float | None


def parse_place(text: str, n_ranks: int = 4) -> Place:
    """Read a place.

    Args:
        text: Such as "memory", "1gbit" or "2x4@1gbit".
        n_ranks: Where the text does not say it.

    Raises:
        ValueError: It is neither of these.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)x([1-9]\d*)@)?([^@\s]+)", text)
    if found is None:
        raise ValueError(_error(text))
    default = (1, n_ranks) if found[3] == MEMORY else (n_ranks, 1)
    n_hosts, per_host = (int(found[1]), int(found[2])) if found[1] else default
    if found[3] == MEMORY and n_hosts > 1:
        raise ValueError(_error(text))
    rate = None if found[3] == MEMORY else parse_rate(found[3])
    return Place(n_hosts, n_hosts * per_host, rate)


def _error(text: str) -> str:
    return (
        "A place is memory, a rate, or hosts x ranks @ one of these, with one host in memory. "
        f"Received: {text!r}. Example: --places 2x4@1gbit"
    )
