"""What tests on emulated clusters need of the machine."""

import pytest

from tfscale.launcher.mpi_command import find_mpi
from tools.cluster import control


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
