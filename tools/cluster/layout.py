"""The names and addresses of an emulated cluster, as pure functions."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from tfscale.config import ConfigError

# Set aside for measuring networks (RFC 2544), so no host on the internet has such an address. No
# packet leaves the namespaces anyway: they have no link to the outside and no default route.
NETWORK = ipaddress.ip_network("198.18.0.0/24")
BRIDGE_ADDRESS = str(NETWORK[1])
BRIDGE = "bridge0"
LINK = "eth0"
MAX_NODES = 64
_FIRST_NODE = 10


@dataclass(frozen=True)
class Node:
    """One emulated host.

    Attributes:
        name: Its host name, which MPI and `socket.gethostname()` see.
        namespace: Its network namespace.
        address: IPv4 address of its `eth0`.
        port: The other end of its link, at the bridge.
        inner: Where `wire` takes what is for the link, and its other end at the bridge, `outer`.
    """

    name: str
    namespace: str
    address: str
    port: str
    inner: str
    outer: str


@dataclass(frozen=True)
class Layout:
    """An emulated cluster.

    Attributes:
        name: Of the cluster; several may exist side by side.
        bridge_namespace: Namespace of the bridge, in which mpiexec runs.
        nodes: In the order of ranks.
    """

    name: str
    bridge_namespace: str
    nodes: tuple[Node, ...]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All network namespaces, the bridge's first."""
        return (self.bridge_namespace, *(node.namespace for node in self.nodes))


def make_layout(name: str, n_nodes: int) -> Layout:
    """Return the layout of a cluster.

    Args:
        name: 1 to 16 lower-case letters and digits, beginning with a letter.
        n_nodes: In [1, 64].

    Returns:
        A layout; the same arguments give the same one.

    Raises:
        ConfigError: An argument does not fit.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", name):
        raise ConfigError(
            "The name of a cluster is 1 to 16 lower-case letters and digits, a letter first. "
            f"Received: name={name!r}."
        )
    if not 1 <= n_nodes <= MAX_NODES:
        raise ConfigError(f"A cluster has 1 to {MAX_NODES} nodes. Received: {n_nodes}.")
    nodes = tuple(
        Node(
            name=f"node{i}",
            namespace=f"tfscale-{name}-node{i}",
            address=str(NETWORK[_FIRST_NODE + i]),
            port=f"port{i}",
            inner=f"inner{i}",
            outer=f"outer{i}",
        )
        for i in range(n_nodes)
    )
    return Layout(name, f"tfscale-{name}-bridge", nodes)


_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_rate(text: str) -> float:
    """Read a link rate such as "1gbit" or "250mbit".

    Returns:
        Bits per second.

    Raises:
        ConfigError: No number with a unit, or outside of [1 Mbit/s, 100 Gbit/s].
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    rate = float(found.group(1)) * _RATE_UNITS[found.group(2)] if found else 0.0
    if not 1e6 <= rate <= 1e11:
        raise ConfigError(
            "A rate is a number with a unit, between 1mbit and 100gbit. "
            f"Received: {text!r}. Example: --rate 1gbit"
        )
    return rate
