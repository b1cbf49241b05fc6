"""Places of ranks: on shared memory, or on an emulated cluster with a rate."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tfscale.launcher.mpi_command import (
    LaunchSpec,
    build_command,
    count_cores,
    end_processes,
    find_mpi,
    new_job,
    thread_variables,
)
from tools.cluster import control, running
from tools.cluster.commands import Shape
from tools.cluster.layout import parse_rate

MEMORY = "memory"
_CLUSTER = f"bench{os.getpid()}"


class RunFailedError(RuntimeError):
    """A measured program failed; the text is the end of its output."""


@contextmanager
def cluster_for(places: Sequence[str], n_nodes: int) -> Iterator[None]:
    """Keep an emulated cluster up while any of `places` needs one."""
    if all(place == MEMORY for place in places):
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
        place: `MEMORY`, or the rate of the links such as "1gbit".
        size: Number of ranks; on a cluster one per node.
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
            if place == MEMORY:
                code, moved = _run_here(size, command, extra, (output, timeout_s)), {}
            else:
                control.set_shape(_CLUSTER, Shape(parse_rate(place)))
                result = running.run(_CLUSTER, size, command, extra, output, timeout_s)
                code, moved = result.exit_code, result.bytes
    except subprocess.TimeoutExpired as error:
        raise RunFailedError(f"more than {timeout_s} s. {_tail(log)}") from error
    if code != 0:
        raise RunFailedError(f"exit code {code}. {_tail(log)}")
    return moved


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
