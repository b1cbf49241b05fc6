"""The state file of an emulated cluster, which outlives commands and crashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfscale.config import ConfigError
from tfscale.files import write_atomically
from tools.cluster.layout import Layout, make_layout

# Emptied when the machine starts, as namespaces are.
FOLDER = Path("/run/tfscale-cluster")


@dataclass(frozen=True)
class State:
    """A cluster that exists, or that was begun.

    Attributes:
        layout: Its names and addresses.
        jobs: Marks of the jobs (see `tfscale.launcher.mpi_command`) started in it that have not
            been seen to end, with the id of each mpiexec.
    """

    layout: Layout
    jobs: Mapping[str, int]


def state_path(name: str, folder: Path = FOLDER) -> Path:
    """Return the state file of a cluster."""
    return folder / f"{name}.json"


def write_state(state: State, folder: Path = FOLDER) -> None:
    """Write the state file of a cluster; a reader sees the old one or the new one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = {
        "name": state.layout.name,
        "n_nodes": len(state.layout.nodes),
        "namespaces": state.layout.namespaces,
        "jobs": dict(state.jobs),
    }
    write_atomically(state_path(state.layout.name, folder), json.dumps(content, indent=2))


def read_state(name: str, folder: Path = FOLDER) -> State | None:
    """Return what the state file of a cluster says, or None where there is no such cluster.

    Names of namespaces are made again from the cluster's name and compared, so that no command is
    ever built from a name that a file may contain.

    Raises:
        ConfigError: The file is not one of ours.
    """
    path = state_path(name, folder)
    try:
        content = json.loads(path.read_text())
        layout = make_layout(content["name"], content["n_nodes"])
        jobs = {str(job): int(pid) for job, pid in content["jobs"].items()}
        is_ours = layout.name == name and list(layout.namespaces) == content["namespaces"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"The state file of a cluster must be one that tfscale wrote. Received: {path}. "
            "Look at it, remove its namespaces by `ip netns del`, then the file."
        )
    return State(layout, jobs)


def delete_state(name: str, folder: Path = FOLDER) -> None:
    """Remove the state file and what stands beside it; harmless where there is none."""
    for path in (state_path(name, folder), script_path(name, folder), wire_path(name, folder)):
        path.unlink(missing_ok=True)


def script_path(name: str, folder: Path = FOLDER) -> Path:
    """Return where the launcher script of a cluster stands."""
    return folder / f"{name}.launcher"


def wire_path(name: str, folder: Path = FOLDER) -> Path:
    """Return the socket at which the program between links and bridge takes orders."""
    return folder / f"{name}.wire"
