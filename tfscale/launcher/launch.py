"""Started by whom: what the launchers tell a process about its rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfscale.errors import ExchangeError

# Where a rank says of itself what `rank_process` wants to know, see `rank_status`.
STATUS_VARIABLE = "TFSCALE_STATUS_FILE"
# Name of the signal that the launcher passes on where ranks are to get SIGTERM, if it is another.
STOP_VARIABLE = "TFSCALE_STOP_SIGNAL"


@dataclass(frozen=True)
class Launch:
    """What a launcher told this process.

    Attributes:
        rank: Number of this process, in [0, size).
        size: Number of processes.
        local_rank: Number among those of this host; None where the launcher does not say.
        local_size: Number of processes on this host; None where the launcher does not say.
        launcher: "gloo" (`horovodrun --gloo`), "openmpi", "mpich", "intel" or "srun".
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    launcher: str


def _integers(environ: Mapping[str, str], *names: str) -> list[int | None]:
    values = [environ.get(name, "") for name in names]
    return [int(v) if v.isdigit() else None for v in values]


def discover(environ: Mapping[str, str]) -> Launch | None:
    """Return what the launcher of this process said, or None for a process started by itself.

    Args:
        environ: Environment variables. Those of `horovodrun --gloo` (HOROVOD_RANK and others)
            come first, then those of Open MPI (OMPI_COMM_WORLD_*), of MPICH and Intel MPI
            (PMI_*), and srun's. A batch script of Slurm has
            SLURM_PROCID too but no step, and counts as started by itself.

    Returns:
        Rank and size with 0 <= rank < size, or None.
    """
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        rank, size, *local = _integers(
            environ, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
        )
        if rank is not None and size is not None and rank < size:
            return Launch(rank, size, local[0], local[1], "gloo")
    names = (
        ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("mpich", "PMI_RANK", "PMI_SIZE"),
        ("mpich", "PMIX_RANK", "PMI_SIZE"),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    )
    for launcher, rank_name, size_name in names:
        rank, size = _integers(environ, rank_name, size_name)
        if rank is None or size is None or rank >= size:
            continue
        if launcher == "mpich" and any(name.startswith("I_MPI_HYDRA") for name in environ):
            launcher = "intel"
        return Launch(rank, size, *_discover_local(environ), launcher)
    return None


def _discover_local(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    for rank_name, size_name in (
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        rank, size = _integers(environ, rank_name, size_name)
        if rank is not None:
            return rank, size
    rank, node = _integers(environ, "SLURM_LOCALID", "SLURM_NODEID")
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return rank, counts[node] if node is not None and node < len(counts) else None


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's list of numbers: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


def require_size(launch: Launch | None, size: int) -> None:
    """Refuse processes that a launcher started together and that have not found each other.

    Args:
        launch: What the launcher said; None without one.
        size: Ranks of the job.

    Raises:
        ExchangeError: They are not all of the launcher's.
    """
    if launch is not None and launch.size != size:
        raise ExchangeError(
            f"All processes of a launcher must find each other. Received: {launch.size} of them, "
            f"and a job of {size}: the launcher and the MPI library do not fit together. Start "
            "with `tfscale run` (under Slurm `tfscale run --slurm`, or srun --mpi=pmi2)."
        )
