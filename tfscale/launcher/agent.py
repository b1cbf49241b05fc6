"""A stand-in for ssh: MPI's processes on nodes that the caller of a job reaches in its own way.

mpiexec starts `python -m tfscale.launcher.agent SOCKET NODE COMMAND...` for each node, as it would
start ssh. The agent sends the command through a Unix socket to the process that has called the job,
copies the output that comes back, and ends with the command's exit status. The processes that
`tfscale.ray.run` starts on Ray's nodes use this module, too; it imports nothing of Ray.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path

from tfscale.comm.places import Places
from tfscale.launcher import mpi_command

# Messages to the caller, and from it.
START, PLACES = "start", "places"
OUTPUT, END, LOST = "output", "end", "lost"
_KIND = "AF_UNIX"
# Word of the command line of a process that is to start another one on a node.
_EXEC = "--exec"
# Seconds in which mpiexec notices by itself that a node is lost, and reports of ranks arrive.
_NOTICE_S = 5.0
_LOOK_S = 0.1
_NOT_STARTED = 127


def variables_of(folder: Path, address: str) -> dict[str, str]:
    """The variables by which MPICH's mpiexec starts its processes by this module.

    Args:
        folder: Where the agent's script is written.
        address: Of the Unix socket at which the caller listens.
    """
    script = folder / "agent"
    program = shlex.join([sys.executable, "-m", __name__, address])
    script.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    script.chmod(0o700)
    # Called "rsh", it gets no options of ssh. Nodes that are this host get an agent as well.
    return {
        "HYDRA_LAUNCHER": "rsh",
        "HYDRA_LAUNCHER_EXEC": str(script),
        "HYDRA_LAUNCHER_AUTOFORK": "0",
        "HYDRA_HOSTNAME_PROPAGATION": "0",
    }


def ask_places(address: str, is_stopped: Callable[[], bool]) -> Places:
    """The places for the next attempt of a job, from its caller; () if there are too few.

    The caller may wait long for them; `is_stopped` ends this.
    """
    with Client(address, _KIND) as connection:
        connection.send((PLACES,))
        while not connection.poll(_LOOK_S):
            if is_stopped():
                return ()
        places = connection.recv()
    return tuple((name, n) for name, n in places)


def command_under(parent: int, command: list[str]) -> list[str]:
    """The command line of a program that dies with the process (and thread) that starts it.

    `preexec_fn` would run Python between fork and exec, which is not safe beside Ray's threads.
    """
    return [sys.executable, "-m", __name__, _EXEC, str(parent), *command]


def main(arguments: list[str]) -> int:
    """Start a command on a node and return its exit status."""
    first, second, *command = arguments
    if first == _EXEC:
        mpi_command.set_death_signal(signal.SIGKILL)
        if os.getppid() == int(second):
            with contextlib.suppress(OSError):
                os.execvp(command[0], command)
            sys.stderr.write(f"tfscale: cannot start {command[0]} on {socket.gethostname()}.\n")
        return _NOT_STARTED
    launcher = os.getppid()
    with contextlib.suppress(EOFError, OSError), Client(first, _KIND) as connection:
        # As rsh, the agent gets words that a shell is to join and read.
        connection.send((START, second, shlex.split(" ".join(command))))
        return _follow(connection, launcher)
    return 1  # the caller has ended


def _follow(connection: Connection, launcher: int) -> int:
    """Copy the command's output until it ends; return its exit status."""
    while True:
        kind, *content = connection.recv()
        if kind == END and content[0] != _NOT_STARTED:
            return content[0]
        if kind in (END, LOST):
            # The connection to a node that was switched off stays open, and mpiexec waits for it.
            time.sleep(_NOTICE_S if kind == LOST else 0)
            if os.getppid() == launcher:
                os.kill(launcher, signal.SIGKILL)
            return 1
        number, data = content
        while data:
            data = data[os.write(number, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
