"""The commands that make, shape and read an emulated cluster, as pure functions."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfscale.config import ConfigError
from tools.cluster.layout import BRIDGE, BRIDGE_ADDRESS, LINK, NETWORK, Layout
from tools.cluster.wire import Quality

# A packet of 64 KB, as the kernel hands them down, must fit into the bucket with room to spare:
# with a smaller bucket it is cut up or dropped, and the retransmissions spoil every measurement.
MIN_BURST_BYTES = 128 * 1024
_BRIDGE_MAC = "02:00:00:00:00:01"
Command = list[str]


@dataclass(frozen=True)
class Shape:
    """Properties of the links; alike for all, and for both directions.

    Attributes:
        rate_bits_s: Bits per second of each direction.
        delay_ms: Added on the way to and from the bridge, so twice between two nodes.
        loss_percent: Packets lost at each end of a link, in [0, 100).
        reorder_percent: Packets that are not delayed and overtake others, in [0, 100).
        queue_ms: How long a packet may wait for its turn at the rate; else it is dropped.
    """

    rate_bits_s: float
    delay_ms: float = 0.0
    loss_percent: float = 0.0
    reorder_percent: float = 0.0
    queue_ms: float = 50.0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: A value is outside of its range.
        """
        percents = (self.loss_percent, self.reorder_percent)
        if not (self.delay_ms >= 0 and all(0 <= percent < 100 for percent in percents)):
            raise ConfigError(
                "A delay is 0 or more, a loss and a share that is reordered in [0, 100). Received: "
                f"delay_ms={self.delay_ms}, loss_percent={self.loss_percent}, "
                f"reorder_percent={self.reorder_percent}."
            )
        if self.reorder_percent and not self.delay_ms:
            raise ConfigError(
                "Packets overtake delayed ones only. Received: "
                f"reorder_percent={self.reorder_percent} without a delay. Add --delay 5."
            )

    @property
    def quality(self) -> Quality:
        """The quality of the links, for netem or for `wire` in its place."""
        return Quality(self.delay_ms, self.loss_percent, self.reorder_percent)


def inside(namespace: str, *words: str) -> Command:
    """Return a command that runs another one in a network namespace."""
    return ["ip", "netns", "exec", namespace, *words]


def up_commands(layout: Layout) -> list[Command]:
    """Return what makes the namespaces, the bridge and the links of a cluster, in order."""
    bridge = layout.bridge_namespace
    mask = f"/{NETWORK.prefixlen}"
    lines = [["ip", "netns", "add", name] for name in layout.namespaces]
    lines += [["ip", "-n", name, "link", "set", "lo", "up"] for name in layout.namespaces]
    lines += [
        # With an address of its own; else it has that of a port, and another one after `wire`.
        ["ip", "-n", bridge, "link", "add", BRIDGE, "address", _BRIDGE_MAC, "type", "bridge"],
        ["ip", "-n", bridge, "addr", "add", BRIDGE_ADDRESS + mask, "dev", BRIDGE],
        ["ip", "-n", bridge, "link", "set", BRIDGE, "up"],
    ]
    for node in layout.nodes:
        peer = ["type", "veth", "peer", "name", LINK, "netns", node.namespace]
        lines += [
            ["ip", "-n", bridge, "link", "add", node.port, *peer],
            ["ip", "-n", bridge, "link", "set", node.port, "master", BRIDGE, "up"],
            ["ip", "-n", node.namespace, "addr", "add", node.address + mask, "dev", LINK],
            ["ip", "-n", node.namespace, "link", "set", LINK, "up"],
        ]
    return lines


def ends_of_links(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield (namespace, device) of both ends of each link: one per direction."""
    for node in layout.nodes:
        yield node.namespace, LINK
        yield layout.bridge_namespace, node.port


def shape_commands(layout: Layout, shape: Shape, has_netem: bool = True) -> list[Command]:
    """Return what gives each direction of each link its rate, and its delay and loss if any.

    A packet is delayed first and then waits for its turn at the rate, whence netem inside tbf.
    Without netem this is the rate alone, and `wire` does the rest.
    """
    burst = max(MIN_BURST_BYTES, int(shape.rate_bits_s / 8 / 1000))
    latency_ms = shape.queue_ms + shape.delay_ms
    rate = f"{round(shape.rate_bits_s)}bit"
    tbf = ["handle", "1:", "tbf", "rate", rate, "burst", str(burst), "latency", f"{latency_ms:g}ms"]
    netem = ["delay", f"{shape.delay_ms:g}ms", "loss", f"{shape.loss_percent:g}%", "limit", "20000"]
    netem += ["reorder", f"{shape.reorder_percent:g}%"] if shape.reorder_percent else []
    lines = []
    for namespace, device in ends_of_links(layout):
        start = ["tc", "-n", namespace, "qdisc"]
        lines.append([*start, "replace", "dev", device, "root", *tbf])
        if has_netem and any(shape.quality):
            parent = ["parent", "1:1", "handle", "10:", "netem"]
            lines.append([*start, "replace", "dev", device, *parent, *netem])
    return lines


def unshape_commands(layout: Layout) -> list[Command]:
    """Return the commands that take rate, delay and loss off every link again."""
    ends = ends_of_links(layout)
    return [["tc", "-n", name, "qdisc", "del", "dev", device, "root"] for name, device in ends]


def probe_commands(layout: Layout) -> list[Command]:
    """Return a command that fails if the kernel has no netem, and changes nothing."""
    start = ["tc", "-n", layout.bridge_namespace, "qdisc"]
    return [
        [*start, "replace", "dev", "lo", "root", "netem"],
        [*start, "del", "dev", "lo", "root"],
    ]


def wire_commands(layout: Layout) -> list[Command]:
    """Return the commands that take links off the bridge; `wire_program` joins their ends.

    These answer no question for an address: the bridge does, which is in the same namespace.
    """
    start = ["ip", "-n", layout.bridge_namespace, "link"]
    lines = []
    for node in layout.nodes:
        lines += [
            [*start, "add", node.inner, "type", "veth", "peer", "name", node.outer],
            [*start, "set", node.inner, "arp", "off", "up"],
            [*start, "set", node.port, "nomaster", "arp", "off"],
            [*start, "set", node.outer, "master", BRIDGE, "up"],
        ]
    return lines


def unwire_commands(layout: Layout) -> list[Command]:
    """Return the commands that put the links on the bridge again."""
    start = ["ip", "-n", layout.bridge_namespace, "link"]
    lines = []
    for node in layout.nodes:
        lines.append([*start, "del", node.inner])
        lines.append([*start, "set", node.port, "master", BRIDGE, "arp", "on"])
    return lines


def wire_program(layout: Layout, path: str) -> Command:
    """Return the program between links and bridge, which takes orders at a socket."""
    pairs = [f"{node.port}:{node.inner}" for node in layout.nodes]
    words = (sys.executable, "-m", "tools.cluster.wire", path, *pairs)
    return inside(layout.bridge_namespace, *words)


def link_command(layout: Layout, node: int, is_up: bool) -> Command:
    """Return the commands that cut the link of a node, or restore it."""
    port = layout.nodes[node].port
    state = "up" if is_up else "down"
    return ["ip", "-n", layout.bridge_namespace, "link", "set", port, state]


def down_commands(layout: Layout) -> list[Command]:
    """Return what removes a cluster; a namespace takes its devices with it."""
    return [["ip", "netns", "del", name] for name in layout.namespaces]


def counters_command(layout: Layout) -> Command:
    """Return what prints the byte counters of all links, see `parse_counters`."""
    return ["ip", "-n", layout.bridge_namespace, "-s", "-j", "link", "show"]


def parse_counters(layout: Layout, text: str) -> dict[str, dict[str, int]]:
    """Read the output of `counters_command`.

    Returns:
        Per node the bytes it has "sent" and "received" since its link was made. What the bridge's
        end of a link receives, the node has sent.
    """
    links = {link["ifname"]: link["stats64"] for link in json.loads(text)}
    return {
        node.name: {
            "sent": links[node.port]["rx"]["bytes"],
            "received": links[node.port]["tx"]["bytes"],
        }
        for node in layout.nodes
    }


def difference(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return per node what the counters grew by."""
    return {
        node: {way: after[node][way] - before[node][way] for way in ("sent", "received")}
        for node in before
    }


def launcher_script(layout: Layout) -> str:
    """Return the script that mpiexec calls as it would call ssh: options, host, shell command.

    It enters the namespace of the node with that address. Each node has its own host name, so
    that the ranks of two nodes do not take themselves for neighbours and use shared memory, and
    its own /sys (`ip netns exec` sees to it; `nsenter --net` does not), from which MPI learns
    which network devices there are. Any other host is refused.
    """
    cases = "\n".join(
        f"  {node.address}) namespace={node.namespace}; name={node.name};;" for node in layout.nodes
    )
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
case "$host" in
{cases}
  *) echo "$host is no node of the emulated cluster {layout.name}" >&2; exit 1;;
esac
case "$1" in
  *=*) ;;  # Open MPI sets variables first
  *) set -- exec "$@";;
esac
exec ip netns exec "$namespace" unshare --uts sh -c "hostname $name && $*"
"""


def run_variables(script: str, n_ranks: int, n_cores: int) -> dict[str, str]:
    """Return the environment that makes hydra use the script, and MPI the emulated links.

    Args:
        script: Path of `launcher_script`'s text.
        n_ranks: Ranks that will run, all on this machine.
        n_cores: Its cores. With fewer than ranks, a rank that waits must give its core away.
    """
    variables = {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": script,
        "HYDRA_IFACE": BRIDGE,
        # Left to itself MPI finds a way around the links, such as shared memory or the devices
        # of other namespaces.
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": LINK,
    }
    if n_ranks > n_cores:
        variables["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
    return variables


def open_mpi_variables(script: str) -> dict[str, str]:
    """Return the environment that makes Open MPI use the script and the emulated links."""
    return {
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": script,
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": LINK,
        # It does not see that nodes share cores.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


def describe(command: Command) -> str:
    """Return a command as one would type it."""
    return shlex.join(command)
