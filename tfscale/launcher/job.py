"""What a job needs besides its command: an MPI, threads for each rank, a mark on every process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from tfscale.config import sets_threads
from tfscale.errors import ConfigError
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


def choose_mpi(mpiexec: str | None, is_slurm: bool) -> Mpi | None:
    """Find the MPI that a job is started with.

    Args:
        mpiexec: Its mpiexec, as the user named it; None as in `find_mpi`.
        is_slurm: srun starts the ranks, and needs none.

    Returns:
        The MPI, or None where there is no mpiexec, or srun does not need what is there.

    Raises:
        ConfigError: There is an mpiexec, named or found, that nobody knows how to use.
    """
    mpi = find_mpi(mpiexec)
    path = mpiexec or (None if is_slurm else find_tool("mpiexec"))
    if mpi is None and path is not None:
        raise ConfigError(
            "mpiexec must be that of MPICH, Open MPI or Intel MPI, which its --version tells. "
            f"Received: {path}, which is another one or cannot be run. Name one with --mpiexec, "
            "install one (pip install mpich), or use --slurm in an allocation."
        )
    return mpi


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _has_other_hosts(spec: LaunchSpec, environ: Mapping[str, str]) -> bool:
    """Return whether ranks may be on other hosts, by the user's word or a scheduler's.

    mpiexec reads by itself where PBS, LSF and Grid Engine say which hosts it may use.
    """
    if spec.hosts:
        here = ("", "localhost", "127.0.0.1", socket.gethostname())
        return any(name not in here for name, _ in spec.hosts)
    hosts = set(environ.get("LSB_MCPU_HOSTS", "").split()[::2])  # "host1 2 host2 2"
    for name in ("PBS_NODEFILE", "PE_HOSTFILE"):
        with contextlib.suppress(OSError):  # not in such a job, or not on its first host
            lines = Path(environ.get(name, "")).read_text().splitlines()
            hosts |= {line.split()[0] for line in lines if line.strip()}
    is_one = environ.get("SLURM_JOB_NUM_NODES", "1") == "1" and len(hosts) <= 1
    return spec.is_slurm or bool(spec.hostfile) or not is_one


def thread_variables(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Share the cores of a host among its ranks.

    Without this every rank starts a thread per core, and the ranks of a host disturb each other.

    Args:
        spec: What will be started.
        environ: Environment variables; what the user set there stays as it is.

    Returns:
        Variables to set: each rank gets cores / ranks-per-host threads, at least 1, for one
        operation, and at least 2 operations at a time, which overlapping communication needs.
        Empty for one rank, where the user has switched it off, and where ranks may be on other
        hosts, whose cores are not known here: `tfscale.init` sees to these, if nothing is set.

    Raises:
        ConfigError: TFSCALE_SET_THREADS cannot be read.
    """
    if not sets_threads(environ) or spec.size < 2 or _has_other_hosts(spec, environ):
        return {}
    threads = max(1, spec.n_cores // spec.size)
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
