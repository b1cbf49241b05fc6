"""Make, shape and remove an emulated cluster: executes what `commands` builds. Needs root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tfscale.config import ConfigError, ExchangeError
from tfscale.launcher.mpi_command import JOB_VARIABLE, end_processes, find_processes
from tools.cluster import commands
from tools.cluster.layout import Layout, make_layout
from tools.cluster.state import (
    State,
    delete_state,
    read_state,
    script_path,
    wire_path,
    write_state,
)
from tools.cluster.wire import Quality

_NAMESPACES = Path("/run/netns")
_ROOT = Path(__file__).parents[2]
_WIRE_START_S = 30.0


def find_obstacle() -> str:
    """Return why no cluster can be emulated here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "setsid", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages iproute2 and util-linux)"
    probe = f"tfscale-probe-{os.getpid()}"
    try:
        _execute(["ip", "netns", "add", probe])
        _execute(["tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", *_PROBED_SHAPE])
    except ExchangeError as error:
        return f"this system does not permit network namespaces with tc: {error}"
    finally:
        if (_NAMESPACES / probe).exists():
            _execute(["ip", "netns", "del", probe])
    return ""


_PROBED_SHAPE = ("tbf", "rate", "1gbit", "burst", "131072", "latency", "50ms")


def _execute(command: Sequence[str]) -> str:
    """Run a command of ours and return its output; ExchangeError with its own text if it fails."""
    done = subprocess.run(
        list(command), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise ExchangeError(f"`{commands.describe(list(command))}` failed: {done.stderr.strip()}")
    return done.stdout


def _need_root() -> None:
    if os.geteuid() != 0:
        raise ConfigError(
            f"An emulated cluster needs root, for its network namespaces. Received: user id "
            f"{os.geteuid()}. Run it by sudo, or in a container with the capabilities NET_ADMIN "
            "and SYS_ADMIN."
        )


def existing(name: str) -> State:
    """Return the state of a cluster that is up.

    Raises:
        ConfigError: Not root, or no such cluster.
    """
    _need_root()
    state = read_state(name)
    if state is None:
        raise ConfigError(
            f"The cluster must be up. Received: name={name!r}, which is not. "
            "Run: python -m tools.cluster up"
        )
    return state


def up(name: str, n_nodes: int) -> Layout:
    """Make a cluster whose links have no limit yet; what is left of one of that name goes first.

    Raises:
        ConfigError: Not root, or an argument does not fit.
        ExchangeError: A command failed; what had been made is removed again.
    """
    _need_root()
    layout = make_layout(name, n_nodes)
    down(name)
    # Written before anything exists, so that `down` finds what a crash leaves.
    write_state(State(layout, {}))
    try:
        for command in commands.up_commands(layout):
            _execute(command)
        script = script_path(name)
        script.write_text(commands.launcher_script(layout))
        script.chmod(0o700)
    except BaseException:
        down(name)
        raise
    return layout


def set_shape(name: str, shape: commands.Shape | None) -> None:
    """Give all links of a cluster a rate, a delay and losses, also while a program runs there.

    Where the kernel has no netem, `wire` delays and loses packets.

    Args:
        name: Of a cluster that is up.
        shape: What the links shall be like; None takes all limits off.

    Raises:
        ConfigError: No such cluster.
        ExchangeError: A command failed.
    """
    layout = existing(name).layout
    has_netem = _has_netem(layout)
    quality = shape.quality if shape and not has_netem else Quality()
    for command in commands.unshape_commands(layout):
        subprocess.run(command, capture_output=True, timeout=60)
    for command in commands.shape_commands(layout, shape, has_netem) if shape else []:
        _execute(command)
    if any(quality):
        _wire(layout, quality)
    else:
        _unwire(layout)


def set_link(name: str, node: int, is_up: bool) -> None:
    """Cut the link of a node, or mend it.

    Raises:
        ConfigError: No such cluster or node.
        ExchangeError: The command failed.
    """
    layout = existing(name).layout
    if not 0 <= node < len(layout.nodes):
        raise ConfigError(f"The nodes are 0 to {len(layout.nodes) - 1}. Received: {node}.")
    _execute(commands.link_command(layout, node, is_up))


def _has_netem(layout: Layout) -> bool:
    try:
        for command in commands.probe_commands(layout):
            _execute(command)
    except ExchangeError:
        return False
    return True


def _wire_job(name: str) -> str:
    """Return the mark of the program between links and bridge, one for each cluster."""
    return f"wire-{name}"


def _wire(layout: Layout, quality: Quality) -> None:
    """Tell the program between links and bridge what to do; start it where there is none."""
    job, path = _wire_job(layout.name), wire_path(layout.name)
    program = commands.wire_program(layout, str(path))
    if not find_processes(job):
        path.unlink(missing_ok=True)
        for command in commands.wire_commands(layout):
            _execute(command)
        subprocess.run(
            ["setsid", "--fork", *program],
            env={**os.environ, JOB_VARIABLE: job},
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    deadline = time.monotonic() + _WIRE_START_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as orders:
        while orders.connect_ex(str(path)) != 0:
            if time.monotonic() > deadline:
                raise ExchangeError(
                    f"`{commands.describe(program)}` does not answer at {path}. Remove the "
                    "cluster by `python -m tools.cluster down`."
                )
            time.sleep(0.05)
        orders.send(" ".join(map(str, quality)).encode())


def _unwire(layout: Layout) -> None:
    """End the program between links and bridge, if there is one."""
    if find_processes(_wire_job(layout.name)):
        end_processes(_wire_job(layout.name))
        for command in commands.unwire_commands(layout):
            _execute(command)


def read_bytes(name: str) -> dict[str, dict[str, int]]:
    """Return per node the bytes "sent" and "received" over its link since the cluster is up."""
    layout = existing(name).layout
    return commands.parse_counters(layout, _execute(commands.counters_command(layout)))


def down(name: str) -> None:
    """End what runs in a cluster and remove it; harmless where there is none.

    Only processes that carry the mark of a job started here are ended, each by its id.

    Raises:
        ConfigError: Not root.
        ExchangeError: A namespace could not be removed; the state file stays.
    """
    _need_root()
    state = read_state(name)
    if state is None:
        return
    for job in (*state.jobs, _wire_job(name)):
        end_processes(job)
    for command in commands.down_commands(state.layout):
        if (_NAMESPACES / command[-1]).exists():
            _execute(command)
    delete_state(name)
