"""What tests on emulated clusters need of the machine."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.environment import QUIET
from tfscale.launcher.mpi_command import find_mpi
from tools.cluster import control, running
from tools.cluster.commands import Shape


def require_cluster() -> None:
    """Skip a test where no emulated cluster can be made: without root, or with another MPI.

    Namespaces need root (CI has it), and only MPICH's mpiexec starts ranks inside of them.
    """
    obstacle = control.find_obstacle()
    if obstacle:
        pytest.skip(obstacle)  # no namespaces without root: nothing that could be tested instead
    if (mpi := find_mpi()) is None or mpi.kind != "mpich":
        # Open MPI's daemons do not start through our launcher, which enters the namespaces.
        pytest.skip("runs in an emulated cluster need MPICH's mpiexec")


def link_bytes() -> np.ndarray:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return np.array([int(fields[8]), int(fields[0])])


FAST = Shape(2e9)


def run_on_cluster(module, n_nodes, size, folder, shape=FAST, environ=None):
    """Run `python -m module RESULT` on links of 2 Gbit/s; return the JSON that rank 0 wrote."""
    require_cluster()
    name = f"test{os.getpid()}"
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", module, str(folder / "result")]
    control.up(name, n_nodes)
    try:
        control.set_shape(name, shape)
        with (folder / "log").open("w+") as log:
            environ = {**QUIET, "PYTHONPATH": path, **(environ or {})}
            result = running.run(name, size, command, environ, log, timeout_s=400)
            log.seek(0)
            assert result.exit_code == 0, log.read()[-3000:]
    finally:
        control.down(name)
    return json.loads((folder / "result").read_text())
