"""What a job needs besides its command: an MPI, threads for each rank, a mark on every process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from tfscale.config import sets_threads
from tfscale.launcher.mpi_command import LaunchSpec, Mpi, parse_version
from tfscale.native.toolchain import find_tool

# Every process of a job carries this variable, so that none can be overlooked at its end.
JOB_VARIABLE = "TFSCALE_JOB"


def find_mpi(mpiexec: str | None = None) -> Mpi | None:
    """Find the MPI to start ranks with.

    Args:
        mpiexec: Its mpiexec; None looks in this environment, in MPI wheels, then on PATH.

    Returns:
        The MPI, or None where there is none that is known.
    """
    path = mpiexec or find_tool("mpiexec")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    known = parse_version(done.stdout + done.stderr)
    return Mpi(*known, path) if known else None


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def thread_variables(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Share the cores of a host among its ranks.

    Without this every rank starts a thread per core, and the ranks of a host disturb each other.

    Args:
        spec: What will be started. Other hosts are taken to have as many cores as this one.
        environ: Environment variables; what the user set there stays as it is.

    Returns:
        Variables to set: each rank gets cores / ranks-per-host threads, at least 1, for one
        operation, and at least 2 operations at a time, which overlapping communication needs.
        Empty where one rank has a host for itself, the number per host is not known, or the user
        has switched it off.

    Raises:
        ConfigError: TFSCALE_SET_THREADS cannot be read.
    """
    if spec.is_slurm or spec.hostfile or not sets_threads(environ):
        return {}
    n_local = max((n for _, n in spec.hosts), default=spec.size)
    if n_local < 2:
        return {}
    threads = max(1, spec.n_cores // n_local)
    wanted = {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": max(2, threads),
    }
    return {name: str(value) for name, value in wanted.items() if name not in environ}


def new_job(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return a job's mark and the environment that carries it."""
    job = uuid.uuid4().hex
    return job, {**environ, JOB_VARIABLE: job}


def find_processes(job: str) -> list[int]:
    """Return the ids of this host's processes that belong to a job, zombies left out."""
    marker = f"{JOB_VARIABLE}={job}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # A zombie's environment is empty.
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def end_processes(job: str, grace_s: float = 2.0) -> None:
    """End what is left of a job: asked first, killed after `grace_s`. Returns when none is left."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience_s
        left = find_processes(job)
        for process in left:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = find_processes(job)
        if not left:
            return
