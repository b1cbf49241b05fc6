"""Hosts of a job, and the places that they have for its ranks, as users write them."""

from __future__ import annotations

import re
import socket

from tfscale.config import ConfigError

# (name of a host, number of ranks it may have) pairs; "" is this host.
Places = tuple[tuple[str, int], ...]


def _items(text: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in text.replace(",", "\n").splitlines()]
    return [line for line in lines if line]


def require_hosts(text: str, source: str) -> str:
    """Return the text of a host list or host file; raises ConfigError if it names no host.

    `source` is the option that gave the text; without the option, ranks start on this host.
    """
    if not _items(text):
        raise ConfigError(
            f"{source} must name a host. Received: {source} without a name. Name them (-H "
            "host1:2,host2:2), or leave the option out to stay on this host."
        )
    return text


def parse_places(text: str) -> Places:
    """Read "host1:2,host2:2", or the lines of a host file, as places for ranks.

    Items are "host:2" or "host slots=2", separated by commas or lines; a name alone means one rank.
    "#" begins a comment. Numbers of a repeated name are added, as in PBS files with a line per
    rank; hosts keep the order in which they first appear.
    """
    places: dict[str, int] = {}
    for item in _items(text):
        match = re.fullmatch(r"([^\s:=]+)(?:(?::|\s+slots\s*=\s*)([1-9]\d*))?", item)
        if match is None:
            raise ConfigError(
                f"hosts must be names with positive numbers. Received: {item}. Write -H "
                "host1:2,host2:2."
            )
        name, number = match.groups()
        places[name] = places.get(name, 0) + int(number or 1)
    return tuple(places.items())


def spread(places: Places, size: int) -> Places:
    """Spread ranks over places, in order; hosts that get no rank are left out."""
    hosts, n_left = [], size
    for name, n_places in places:
        if n_left:
            hosts.append((name, min(n_places, n_left)))
            n_left -= hosts[-1][1]
    if n_left:
        raise ConfigError(
            f"hosts must have a place for each of {size} ranks. Received: "
            f"hosts={listed(places)}, {n_left} too few. Raise the numbers or lower -np."
        )
    return tuple(hosts)


def listed(hosts: Places) -> str:
    """Return hosts and places as "host1:2,host2:2"."""
    return ",".join(f"{name}:{n}" for name, n in hosts)


def is_this_host(name: str) -> bool:
    """Return whether a name in a list of hosts is that of this one, with or without its domain."""
    if name in ("", "localhost", "127.0.0.1"):
        return True
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]
