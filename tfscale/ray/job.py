"""`tfscale.ray.run`: the ranks of a job on nodes that a placement group of Ray reserves.

The job is that of `tfscale.run`: a process beside the caller runs MPI's mpiexec, watches the ranks
and starts them again. Two things differ. mpiexec reaches nodes through an agent instead of ssh
(`launcher/agent.py`): the agent asks the caller, and the caller asks an actor on the node, which
starts MPI's process there. And the function and its results go through the object store of Ray, as
nodes need not share files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfscale.comm.places import Places, listed
from tfscale.config import (
    ConfigError,
    ExchangeError,
    RankError,
    check_integer,
    environment,
    require,
)
from tfscale.launcher import agent, call, mpi_command
from tfscale.launcher.from_python import call_on_ranks
from tfscale.ray.placement import Placement, name_of, say

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_TIMEOUT_S = 100.0
# Seconds between looks: of the caller at nodes that are lost, and of an actor at its process.
_LOOK_S, _READ_S = 1.0, 0.5
# Seconds that nodes have to end their processes, and to send results after the end of a job.
_CLEANUP_S = 10.0
_COLLECT_S = 600.0
_MAX_REASON = 300  # characters of Ray's text
_FOLDER = "tfscale-ray-"  # begin of the names of folders on nodes
# Arguments of `tfscale.run` that Ray's have the place of.
_REPLACED = {
    "np": "Use num_workers.",
    "hosts": "The placement group chooses nodes.",
    "hostfile": "The placement group chooses nodes.",
    "slurm": "Ray starts the processes.",
    "restarts": "Use max_restarts.",
    "min_np": "A restart waits for a node in the place of a lost one.",
}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int = 4,
    *,
    cpus_per_worker: float = 1,
    resources_per_worker: Mapping[str, float] | None = None,
    workers_per_bundle: int = 1,
    strategy: str = "PACK",
    placement_group: PlacementGroup | None = None,
    max_restarts: int = 0,
    timeout_s: float = _TIMEOUT_S,
    **options: Any,
) -> list[Any]:
    """Call a function on ranks that run on the nodes of a Ray cluster; return its results by rank.

    A placement group reserves the resources, and is removed at the end. An actor on each node
    starts MPI's process, which starts the ranks. `tfscale.run` has more about the function: how it
    is sent, what ranks inherit, what is shown, and how ranks end. Without `ray.init` before, it is
    called here. The caller must be a process of the cluster: a driver on a node, a task or an
    actor.

    Args:
        fn: Called as `fn(*args, **kwargs)` on every rank, where it begins with `tfscale.init()`
            unless `distribute=True` is given.
        args: Arguments by position. A `ray.ObjectRef` is replaced by its value, as in tasks.
        kwargs: Arguments by name; the same holds for these.
        num_workers: Number of ranks.
        cpus_per_worker: CPUs that Ray reserves for each rank, and threads that TensorFlow gets.
        resources_per_worker: Other resources of each rank, as in a bundle of a placement group.
        workers_per_bundle: Ranks that share a bundle, and so a node.
        strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD": how bundles are placed.
        placement_group: One that exists, whose CPUs have room for the ranks; it remains. By default
            a new one is made. The first bundle is used last, as it may hold the caller.
        max_restarts: Call the function again after the failure of a rank or a node, so many times
            at most. With `tfscale.callbacks.Checkpoint` in a folder that all nodes share, it
            continues from the last checkpoint.
        timeout_s: Seconds to wait for the resources, at the start and at each restart.
        **options: Further arguments of `tfscale.run`: `distribute`, `env`, `all_output`,
            `output_prefix`, `grace_s`, `quiet`, and others.

    Returns:
        The results, one for each rank in order.

    Raises:
        ConfigError: An argument is invalid; the cluster has no room for the ranks within
            `timeout_s`; a node lacks what ranks need; or the caller is Ray's client.
        RankError: The function failed on a rank, or did not return: the text has its traceback, and
            `__cause__` is its exception. If a node was lost, the text begins with that node,
            `rank` is the first of its ranks, and `__cause__` is the exception of Ray.
        KeyboardInterrupt: The call was interrupted; all ranks have ended.

    Examples:
        >>> def train(rate):
        ...     tfscale.init()
        ...     return tfscale.rank(), float(tfscale.allreduce(rate, op=tfscale.Sum))
        >>> tfscale.ray.run(train, args=(0.5,), num_workers=2)  # doctest: +SKIP
        [(0, 1.0), (1, 1.0)]
    """
    for name in options.keys() & _REPLACED.keys():
        raise ConfigError(
            f"{name} is an argument of tfscale.run that tfscale.ray.run does without. Received: "
            f"{name}={options[name]!r}. {_REPLACED[name]}"
        )
    size = check_integer("num_workers", num_workers, 1)
    each = {"CPU": cpus_per_worker, **(resources_per_worker or {})}
    require(cpus_per_worker > 0, "cpus_per_worker", "above 0", cpus_per_worker)
    require(strategy in STRATEGIES, "strategy", f"one of {', '.join(STRATEGIES)}", strategy)
    require(timeout_s > 0, "timeout_s", "above 0", timeout_s)
    programs = [sys.executable, *_programs_of_mpich(options.get("mpiexec"))]
    connect()
    args = [_value_of(value) for value in args]
    kwargs = {name: _value_of(value) for name, value in (kwargs or {}).items()}
    arguments = {"np": size, "restarts": check_integer("max_restarts", max_restarts, 0), **options}
    n_each = check_integer("workers_per_bundle", workers_per_bundle, 1)
    with Placement.of(placement_group, each, size, n_each, strategy, timeout_s) as placement:
        variables = _thread_variables(cpus_per_worker, options.get("env") or {})
        nodes = _Nodes(placement, variables, programs)
        try:
            return call_on_ranks(fn, args, kwargs, arguments, nodes)
        except RankError as error:
            # An error of communication on another rank follows from the loss.
            is_cause = error.__cause__ and not isinstance(error.__cause__, ExchangeError)
            if nodes.lost is None or is_cause:
                raise
            raise nodes.lost.error(error) from nodes.lost.reason


def connect() -> None:
    """Connect this process to a Ray cluster unless it is, and refuse Ray's client."""
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            "tfscale.ray needs a process of the cluster. Received: a connection by Ray's client "
            "(ray://). Call it in a task: ray.get(ray.remote(tfscale.ray.run).remote(train))."
        )
    if not ray.is_initialized():
        ray.init()


def _programs_of_mpich(mpiexec: str | None) -> list[str]:
    """The programs of MPICH that nodes need; raises a ConfigError for another MPI."""
    mpi = mpi_command.choose_mpi(mpiexec, is_slurm=False)
    if mpi is None:
        return []  # the start says so
    if mpi.kind != "mpich":
        raise ConfigError(
            "tfscale.ray needs an mpiexec of MPICH, which starts processes through Ray. Received: "
            f"{mpi.mpiexec} of {mpi.kind} {mpi.version}. pip install mpich, or name one with "
            "mpiexec=."
        )
    return [str(Path(mpi.mpiexec).resolve().with_name("hydra_pmi_proxy"))]


def _value_of(value: Any) -> Any:
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


def _thread_variables(cpus: float, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that limit a rank to the CPUs that Ray has reserved for it."""
    threads = max(1, int(cpus))
    wanted = {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": max(2, threads),
    }
    present = {**environment(), **env}
    return {name: str(value) for name, value in wanted.items() if name not in present}


# On a node.


def _remove_folders_of_killed() -> None:
    """Remove what actors have left that were killed: those that live hold the locks of theirs."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # of another user, or removed just now
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (path / call.FILE).exists():  # written after the lock is taken
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)


class _Node:
    """An actor that runs MPI's process of one attempt on its node."""

    def __init__(self, payload: bytes, start_in: str) -> None:
        _remove_folders_of_killed()
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        self._lock = os.open(self._folder, os.O_RDONLY)  # no child process inherits it
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self._folder / call.FILE).write_bytes(payload)
        self._variables = {
            call.FOLDER_VARIABLE: str(self._folder),
            call.START_IN_VARIABLE: start_in if os.path.isdir(start_in) else os.getcwd(),
        }
        self._output: queue.SimpleQueue[tuple[int, bytes | int]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def look(self, programs: list[str]) -> tuple[str, list[str]]:
        """The id of this node, and those of some programs that it lacks."""
        lacks = [program for program in programs if not shutil.which(program)]
        return ray.get_runtime_context().get_node_id(), lacks

    def start(self, command: list[str]) -> None:
        """Start MPI's process, which starts the ranks of this node."""
        threading.Thread(target=self._run, args=(command,), daemon=True).start()

    def _run(self, command: list[str]) -> None:
        # The process dies with this thread: it must be the one that waits.
        self._process = subprocess.Popen(
            agent.command_under(os.getpid(), command),
            env={**environment(), **self._variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        pipes = {1: self._process.stdout, 2: self._process.stderr}
        copiers = [threading.Thread(target=self._copy, args=item) for item in pipes.items()]
        for copier in copiers:
            copier.start()
        code = self._process.wait()
        for copier in copiers:
            copier.join(_READ_S)  # a process that a rank has left may hold the pipe open
        self._output.put((0, code if code >= 0 else 128 - code))

    def _copy(self, number: int, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            self._output.put((number, data))

    def read(self) -> list[tuple[int, bytes | int]]:
        """Output since the last call, as (1 or 2, bytes); after the end (0, exit status)."""
        with contextlib.suppress(queue.Empty):
            output = [self._output.get(timeout=_READ_S)]
            while not self._output.empty():
                output.append(self._output.get_nowait())
            return output
        return []

    def end(self) -> dict[str, bytes]:
        """End all processes of the job on this node; return the files that ranks have written."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        # Not by the id of the job, which mpiexec and nodes of the same host have as well.
        mpi_command.end_processes(str(self._folder), variable=call.FOLDER_VARIABLE)
        paths = [path for path in self._folder.glob("*") if path.name != call.FILE]
        files = {path.name: path.read_bytes() for path in paths}
        shutil.rmtree(self._folder, ignore_errors=True)
        return files


# In the caller.


@dataclass(frozen=True)
class _Lost:
    """A node that was lost, or whose actor was, with its ranks and the exception of Ray."""

    node: str
    ranks: tuple[int, ...]
    reason: RayError

    def error(self, error: RankError) -> RankError:
        """The error of the job, which begins with the node."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        reason = " ".join(str(self.reason).split())[:_MAX_REASON]
        return RankError(
            f"Ray node {self.node} or its actor was lost, with {ranks}: {reason}\n{error}",
            rank=self.ranks[0],
            exit_code=error.exit_code,
        )


class _Nodes:
    """The nodes of a job, for `from_python.call_on_ranks`: actors, and the socket for agents.

    Attributes:
        lost: The first node that was lost in the last attempt, or None.
    """

    def __init__(
        self, placement: Placement, variables: Mapping[str, str], programs: list[str]
    ) -> None:
        self._placement, self._variables, self._programs = placement, variables, programs
        self._actors: dict[str, Any] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._payload: ray.ObjectRef | None = None
        self._folder = Path()
        self._threads: list[threading.Thread] = []
        self.lost: _Lost | None = None

    @contextlib.contextmanager
    def serve(self, folder: Path) -> Iterator[Mapping[str, Any]]:
        """Start processes on nodes for the agents of a job; see `from_python.Nodes`."""
        self._folder = folder
        self._payload = ray.put((folder / call.FILE).read_bytes())
        try:
            places = self._place()
            with (
                # The path of a socket has 107 characters at most: not in TMPDIR.
                tempfile.TemporaryDirectory(prefix="tfscale-", dir="/tmp") as short,
                Listener(address := f"{short}/nodes", "AF_UNIX", backlog=128) as listener,
            ):
                accepting = threading.Thread(target=self._accept, args=(listener,), daemon=True)
                accepting.start()
                try:
                    yield {
                        "hosts": listed(places),
                        "env": {**self._variables, **self._ray_variables(folder, address)},
                        "places_from": address,
                    }
                finally:
                    with Client(address, "AF_UNIX") as connection:
                        connection.send((agent.END,))
                    accepting.join()
                    self._join()
        finally:
            self._kill_actors()

    def _ray_variables(self, folder: Path, address: str) -> dict[str, str]:
        # With it, `ray.init()` in a rank joins this cluster.
        cluster = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        return {**cluster, **agent.variables_of(folder, address)}

    def _place(self) -> Places:
        """Start an actor on each node of the placement group; return nodes with their ranks."""
        deadline = time.monotonic() + self._placement.timeout_s
        while True:
            self._kill_actors()
            self._placement.wait(deadline)
            bundles = self._placement.bundles_by_node()
            names = {node["NodeID"]: name_of(node) for node in ray.nodes() if node["Alive"]}
            if bundles.keys() <= names.keys() and self._start_actors(bundles, names, deadline):
                break
            # Ray has not noticed a node's loss yet, or has moved bundles just now.
            if time.monotonic() >= deadline:
                raise self._placement.too_few()
            time.sleep(_LOOK_S)
        places, first = [], 0
        for node, indices in bundles.items():
            n_ranks = sum(self._placement.ranks[index] for index in indices)
            self._ranks[names[node]] = tuple(range(first, first + n_ranks))
            places.append((names[node], n_ranks))
            first += n_ranks
        self.lost = None
        return tuple(places)

    def _start_actors(
        self, bundles: Mapping[str, list[int]], names: Mapping[str, str], deadline: float
    ) -> bool:
        """Start an actor on each node, and return whether all are where they should be."""
        for node, indices in bundles.items():
            where = PlacementGroupSchedulingStrategy(
                self._placement.group, placement_group_bundle_index=indices[0]
            )
            # `end` must not wait for `read`.
            options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": where}
            make = ray.remote(_Node).options(**options)
            self._actors[names[node]] = make.remote(self._payload, os.getcwd())
        asked = [actor.look.remote(self._programs) for actor in self._actors.values()]
        try:
            answers = ray.get(asked, timeout=max(1.0, deadline - time.monotonic()))
        except GetTimeoutError:
            return False
        except RayError as error:
            if self.lost is not None:  # the loss of a node that Ray has not noticed yet
                return False
            raise ConfigError(
                "tfscale.ray.run needs tfscale on all nodes. Received: an actor that cannot start: "
                f"{error}. Install the same packages there, or use Ray's runtime_env."
            ) from error
        faults = {n: lacks for n, (_, lacks) in zip(self._actors, answers, strict=True) if lacks}
        if faults:
            text = "; ".join(f"node {n} lacks {', '.join(lacks)}" for n, lacks in faults.items())
            raise ConfigError(
                "tfscale.ray.run needs the caller's programs on all nodes, under the same paths. "
                f"Received: {text}. Install the same environment there."
            )
        return [node for node, _ in answers] == [*bundles]

    def _kill_actors(self) -> None:
        endings = [actor.end.remote() for actor in self._actors.values()]
        with contextlib.suppress(RayError):
            ray.wait(endings, num_returns=len(endings), timeout=_CLEANUP_S) if endings else None
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._ranks = {}, {}

    def _join(self) -> None:
        """Wait until the agents of an attempt have ended, and what they started on nodes."""
        deadline = time.monotonic() + _COLLECT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: Listener) -> None:
        """Serve the agents and the process that starts ranks, each on a thread of its own."""
        while True:
            connection = listener.accept()
            try:
                message = connection.recv()
            except (EOFError, OSError):  # an agent that was killed
                continue
            if message[0] == agent.END:
                connection.close()
                return
            thread = threading.Thread(target=self._answer, args=(connection, *message), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _answer(self, connection: Connection, kind: str, *content: Any) -> None:
        with contextlib.suppress(OSError), connection:  # the other end was killed
            if kind == agent.START:
                self._run_on_node(connection, *content)
                return
            self._join()  # of the attempt before, whose actors end now
            try:
                places = self._place()
            except ConfigError as error:
                say(f"tfscale: {error}\n")
                places = ()
            connection.send(places)

    def _run_on_node(self, connection: Connection, name: str, command: list[str]) -> None:
        """Run MPI's process on a node for an agent, until it ends or the agent does."""
        actor = self._actors[name]
        try:
            ray.get(actor.start.remote(_with_address(command)))
            code = None
            try:
                while code is None:
                    for number, data in ray.get(actor.read.remote()):
                        if number == 0:
                            code = data
                        else:
                            connection.send((agent.OUTPUT, number, data))
                    if connection.poll():  # closed
                        break
            finally:  # also where the agent was killed
                for file, content in ray.get(actor.end.remote()).items():
                    (self._folder / file).write_bytes(content)
            connection.send((agent.END, code))
        except RayError as error:
            self.lost = self.lost or _Lost(name, self._ranks[name], error)
            connection.send((agent.LOST,))


def _with_address(command: list[str]) -> list[str]:
    """The command of MPI's process with this node's address, as others may not know its name."""
    if "--control-port" not in command:
        return command
    index = command.index("--control-port") + 1
    port = command[index].rpartition(":")[2]
    return [*command[:index], f"{ray.util.get_node_ip_address()}:{port}", *command[index + 1 :]]
