"""Run programs on the nodes of an emulated cluster, and prove that they used its links."""

from __future__ import annotations

import signal
import subprocess
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from tfscale.config import ConfigError, ExchangeError, environment
from tfscale.launcher.mpi_command import (
    JOB_VARIABLE,
    LaunchSpec,
    Mpi,
    build_command,
    end_processes,
    find_mpi,
    new_job,
    thread_variables,
)
from tfscale.native.cores import count_cores
from tools.cluster import commands
from tools.cluster.control import existing, read_bytes
from tools.cluster.layout import Layout
from tools.cluster.state import State, read_state, script_path, write_state

# What mpiexec and its helpers themselves say to each other stays below this, per node.
_LEAST_PAYLOAD_BYTES = 16 * 1024


@dataclass(frozen=True)
class RunResult:
    """Result of a run in a cluster.

    Attributes:
        exit_code: mpiexec's.
        bytes: Per node what it "sent" and "received" over its link during the run.
    """

    exit_code: int
    bytes: dict[str, dict[str, int]]


def run(
    name: str,
    size: int,
    command: Sequence[str],
    extra: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
    timeout_s: float | None = None,
    n_nodes: int | None = None,
    mpiexec: str | None = None,
) -> RunResult:
    """Run a program on the nodes of a cluster, ranks spread evenly in order.

    Args:
        name: Of a cluster that is up.
        size: Number of ranks.
        command: Program and arguments of each rank.
        extra: Environment variables in addition.
        output: Where the ranks print; None is this process's own output.
        timeout_s: Limit in seconds.
        n_nodes: Only the first nodes; None for as many as there are ranks, or all.
        mpiexec: That of MPICH or Open MPI; None for the one of this environment. Open MPI's ranks
            get `extra`, and no other variables of this process.

    Returns:
        Exit code and what the links moved. None of the ranks is left.

    Raises:
        ConfigError: No such cluster, neither MPICH nor Open MPI, or nothing to start.
        ExchangeError: More than one node took part and a link moved next to nothing although the
            program succeeded: its messages went another way, and its times mean nothing.
        subprocess.TimeoutExpired: It took longer than `timeout_s`.
    """
    state = existing(name)
    n_nodes = min(size, n_nodes or size, len(state.layout.nodes))
    mpi = find_mpi(mpiexec)
    words, environ = _prepare(state.layout, (size, n_nodes), command, extra or {}, mpi)
    before = read_bytes(name)
    job, environ = new_job(environ)
    code = _run_marked(state, job, words, environ, (output, timeout_s))
    moved = commands.difference(before, read_bytes(name))
    used = dict(list(moved.items())[:n_nodes])
    if code == 0 and len(used) > 1:
        check_moved(used)
    return RunResult(code, moved)


def check_moved(moved: Mapping[str, Mapping[str, int]]) -> None:
    """Make sure that the ranks talked over their links.

    Raises:
        ExchangeError: A link moved less than MPI's own start does.
    """
    idle = [node for node, ways in moved.items() if min(ways.values()) < _LEAST_PAYLOAD_BYTES]
    if idle:
        raise ExchangeError(
            "A program on several nodes must move bytes over each link. Received: next to none "
            f"at {', '.join(idle)}: {dict(moved)}. MPI took another way, so the times mean "
            "nothing; or the program exchanges nothing."
        )


def _prepare(
    layout: Layout,
    where: tuple[int, int],
    command: Sequence[str],
    extra: Mapping[str, str],
    mpi: Mpi | None,
) -> tuple[list[str], dict[str, str]]:
    size, n_nodes = where
    if mpi is not None and mpi.kind not in ("mpich", "openmpi"):
        raise ConfigError(
            "Runs in an emulated cluster need the mpiexec of MPICH or Open MPI. Received: "
            f"{mpi.kind} {mpi.version}. Install MPICH: pip install mpich"
        )
    script, is_open = str(script_path(layout.name)), mpi is not None and mpi.kind == "openmpi"
    spec = LaunchSpec(tuple(command), size, n_cores=count_cores())
    if is_open:
        variables = commands.open_mpi_variables(script)
    else:
        variables = commands.run_variables(script, size, spec.n_cores)
    environ = {**environment(), **variables, **extra}
    # All nodes share the cores of this machine.
    threads = thread_variables(spec, environ)
    environ = {**environ, **threads}
    # Open MPI passes on only those of its own, and what it is told.
    passed = dict.fromkeys([*extra, *threads, JOB_VARIABLE], "") if is_open else None
    counts = [size // n_nodes + (i < size % n_nodes) for i in range(n_nodes)]
    hosts = tuple((node.address, n) for node, n in zip(layout.nodes, counts, strict=False))
    placed = LaunchSpec(
        tuple(command),
        size,
        hosts=hosts,
        n_cores=spec.n_cores,
        bind_to="none",
        is_root=True,
        environment=passed,
    )
    words = build_command(placed, mpi)
    return commands.inside(layout.bridge_namespace, *words), environ


def leave_on_sigterm() -> None:
    """Make SIGTERM an exception of the main thread, so that the caller removes its cluster."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + number)


def _note_job(state: State, job: str, pid: int | None) -> None:
    """Add a job to the state file, or remove it; other runs in this cluster write there, too."""
    present = read_state(state.layout.name)
    if present is None:
        return  # the cluster was removed meanwhile
    jobs = {mark: own for mark, own in present.jobs.items() if mark != job}
    write_state(State(state.layout, jobs if pid is None else {**jobs, job: pid}))


def _run_marked(
    state: State,
    job: str,
    words: list[str],
    environ: Mapping[str, str],
    how: tuple[IO[str] | None, float | None],
) -> int:
    """Run mpiexec to its end, with the state file naming it as long as any rank may exist."""
    output, timeout_s = how
    stderr = subprocess.STDOUT if output else None
    handler = signal.signal(signal.SIGTERM, _stop)
    try:
        process = subprocess.Popen(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=stderr,
            start_new_session=True,
        )
        _note_job(state, job, process.pid)
        return process.wait(timeout_s)
    finally:
        end_processes(job)
        _note_job(state, job, None)
        signal.signal(signal.SIGTERM, handler)
