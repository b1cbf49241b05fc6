"""Places for ranks: hosts as they are given, and ranks spread over them; pure functions."""

from __future__ import annotations

import re

from tfscale.errors import ConfigError

# (name of a host, number of ranks it may have) pairs; "" is this host.
Places = tuple[tuple[str, int], ...]


def _items(text: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in text.replace(",", "\n").splitlines()]
    return [line for line in lines if line]


def require_hosts(text: str, source: str) -> str:
    """Return a list of hosts that names one at least: an empty one is no wish for this host.

    Args:
        text: The list, or the text of a host file in any format.
        source: The option that it comes from.

    Raises:
        ConfigError: It names none.
    """
    if not _items(text):
        raise ConfigError(
            f"Hosts that are given must be named. Received: {source} without a name. "
            "Name them (-H host1:2,host2:2), or leave the option out to stay on this host."
        )
    return text


def parse_places(text: str) -> Places:
    """Read "host1:2,host2:2", or the lines of a host file, as places for ranks.

    Args:
        text: Names with the number of ranks each may have, "host:2" or "host slots=2"; a name
            alone may have 1. Items are separated by commas or lines; "#" begins a comment. A name
            that comes again adds to its number, as in files of PBS with a line per rank.

    Returns:
        (name, number of places) pairs, each name once, in the order in which they first come.

    Raises:
        ConfigError: A number is not positive, or there is something else.
    """
    places: dict[str, int] = {}
    for item in _items(text):
        found = re.fullmatch(r"([^\s:=]+)(?:(?::|\s+slots\s*=\s*)([1-9]\d*))?", item)
        if found is None:
            raise ConfigError(
                f"A host is a name and a positive number of ranks. Received: {item}. "
                "Write -H host1:2,host2:2."
            )
        name, number = found.groups()
        places[name] = places.get(name, 0) + int(number or 1)
    return tuple(places.items())


def spread(places: Places, size: int) -> Places:
    """Spread `size` ranks over places, in order.

    Args:
        places: (name, number of places) pairs.
        size: Number of ranks to place.

    Returns:
        Pairs whose numbers sum up to `size`; hosts that get no rank are left out.

    Raises:
        ConfigError: There are fewer places than ranks.
    """
    hosts, n_left = [], size
    for name, n_places in places:
        if n_left:
            hosts.append((name, min(n_places, n_left)))
            n_left -= hosts[-1][1]
    if n_left:
        text = ",".join(f"{name}:{n}" for name, n in places)
        raise ConfigError(
            f"The hosts must have a place for each of {size} ranks. Received: hosts={text}, "
            f"{n_left} too few. Raise the numbers or lower -np."
        )
    return tuple(hosts)


def parse_hosts(text: str, size: int) -> Places:
    """Read "host1:2,host2:2" and spread `size` ranks over it; see `parse_places`, `spread`."""
    return spread(parse_places(text), size)
