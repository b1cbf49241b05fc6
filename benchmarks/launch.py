"""Places of ranks: on shared memory, or on an emulated cluster with a rate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.places import MEMORY, SLOW_MOTION, Place, parse_place
from benchmarks.provenance import ROOT
from tfscale.launcher.mpi_command import (
    LaunchSpec,
    build_command,
    end_processes,
    find_mpi,
    new_job,
    thread_variables,
)
from tfscale.native.cores import count_cores
from tools.cluster import control, running
from tools.cluster.commands import Shape

_CLUSTER = f"bench{os.getpid()}"
_TORCH = ROOT / "build" / "ddp" / "bin" / "python"
_OPEN_MPI = ROOT / "build" / "open-mpi" / "bin"
# HAN, its collectives for several ranks on each host, is not used by itself.
_WITH_HAN = {"OMPI_MCA_coll_han_priority": "100"}


class RunFailedError(RuntimeError):
    """A measured program failed; the text is the end of its output."""


def has_ddp() -> bool:
    """Return whether `make ddp` has installed PyTorch."""
    return _TORCH.exists()


def has_open_mpi() -> bool:
    """Return whether `make open-mpi` has installed it."""
    return (_OPEN_MPI / "mpiexec").exists()


def interpreter_of(system: str) -> str:
    """Return the Python that runs a system."""
    if system.startswith("open-mpi"):
        return str(_OPEN_MPI / "python")
    return str(_TORCH) if system.startswith(("ddp", "keras-torch")) else sys.executable


@contextmanager
def cluster_for(places: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Keep an emulated cluster up while any of these places, with numbers of ranks, needs one."""
    n_nodes = max((parse_place(*one).n_hosts for one in places if MEMORY not in one[0]), default=0)
    if not n_nodes:
        yield
        return
    control.up(_CLUSTER, n_nodes)
    try:
        yield
    finally:
        control.down(_CLUSTER)


def run_ranks(
    place: str, size: int, command: Sequence[str], extra: Mapping[str, str], timeout_s: float
) -> dict[str, dict[str, int]]:
    """Run a program at a place and wait for its end; no rank is left.

    Args:
        place: See `benchmarks.places`.
        size: Number of ranks.
        command: Program and arguments.
        extra: Environment variables in addition.
        timeout_s: Limit in seconds.

    Returns:
        Per node the bytes "sent" and "received"; empty on shared memory.

    Raises:
        RunFailedError: Its exit code was not 0, or it took too long.
    """
    log = Path(extra["BENCH_LOG"])
    try:
        with log.open("w") as output:
            where = parse_place(place, size)
            shape = shape_of(where, float(extra.get(SLOW_MOTION, "1")))
            if shape is None:
                code, moved = _run_here(size, command, extra, (output, timeout_s)), {}
            else:
                control.set_shape(_CLUSTER, shape)
                is_open = Path(command[0]).parent == _OPEN_MPI
                given = (command, {**extra, **_WITH_HAN} if is_open else extra, output, timeout_s)
                mpiexec = str(_OPEN_MPI / "mpiexec") if is_open else None
                result = running.run(_CLUSTER, size, *given, n_nodes=where.n_hosts, mpiexec=mpiexec)
                code, moved = result.exit_code, result.bytes
    except subprocess.TimeoutExpired as error:
        raise RunFailedError(f"more than {timeout_s} s. {_tail(log)}") from error
    if code != 0:
        raise RunFailedError(f"exit code {code}. {_tail(log)}")
    return moved


def shape_of(place: Place, slow_motion: float = 1.0) -> Shape | None:
    """Return the links of a place, None in memory, where all times are so many times as long.

    Packets wait as many times as long in queues, too, which so hold as many bytes.
    """
    if place.rate_bits_s is None:
        return None
    rate = place.rate_bits_s / slow_motion
    # A packet passes two links each way.
    return Shape(rate, place.rtt_ms / 4 * slow_motion, queue_ms=Shape.queue_ms * slow_motion)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _run_here(size: int, command: Sequence[str], extra: Mapping[str, str], how: tuple) -> int:
    output, timeout_s = how
    spec = LaunchSpec(tuple(command), size, is_root=os.geteuid() == 0, n_cores=count_cores())
    environ = {**os.environ, **extra}
    job, environ = new_job({**environ, **thread_variables(spec, environ)})
    process = subprocess.Popen(
        build_command(spec, find_mpi()),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s)
    finally:
        end_processes(job)  # mpiexec too, which carries the job's mark
        process.wait()
