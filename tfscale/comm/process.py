"""This process within its job: launch variables, status file, and the end after an error."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import re
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

from tfscale import config
from tfscale.config import ExchangeError

# Path of the file in which a rank reports its status to the process beside it
# (`tfscale.launcher.rank_process`); see `RankStatus`.
STATUS_VARIABLE = "TFSCALE_STATUS_FILE"
# Name of the signal by which the launcher asks ranks to stop, if it is not SIGTERM.
STOP_VARIABLE = "TFSCALE_STOP_SIGNAL"
# Process id of a rank, and an identity of its launch: children of a rank inherit the launcher's
# variables, but are not ranks.
RANK_VARIABLE = "TFSCALE_RANK_PROCESS"


@dataclass(frozen=True)
class Launch:
    """Place of this process in the job, and on its host where the launcher states that."""

    rank: int  # in [0, size)
    size: int
    local_rank: int | None
    local_size: int | None
    launcher: str  # "gloo" (`horovodrun --gloo`), "openmpi", "mpich", "intel" or "srun"


def _integers(environ: Mapping[str, str], *names: str) -> list[int | None]:
    values = [environ.get(name, "") for name in names]
    return [int(v) if v.isdigit() else None for v in values]


def discover(environ: Mapping[str, str]) -> Launch | None:
    """Return the place that the launcher gave this process; None for one started without launcher.

    A process that a rank started is not a rank. A Slurm batch script has SLURM_PROCID too, but no
    step, and counts as started without a launcher.
    """
    pid, _, launch = environ.get(RANK_VARIABLE, "").partition(":")
    if pid not in ("", str(os.getpid())) and _connection(environ) in ("", launch):
        return None
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


def _connection(environ: Mapping[str, str]) -> str:
    """Return an identity of the launch; "" where its socket was not inherited."""
    if "PMI_FD" in environ:
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(int(environ["PMI_FD"]))
            return str(status.st_ino) if stat.S_ISSOCK(status.st_mode) else ""
        return ""
    names = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return " ".join(environ.get(name, "") for name in names).strip()


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


# MPICH 5 publishes 4096 bytes for a rank with UCX: its address, and what follows in memory. They go
# to Slurm's PMI2 in lines of up to 1080 characters, of which it reads 1024, unless most bytes are
# zero; then ranks hang or are aborted in MPI_Init. Addresses of libfabric (OFI) are short.
SLURM_VARIABLES = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of MPI for a rank that `srun --mpi=pmi2` started on several nodes.

    Slurm's PMI2 sets PMI_JOBID. MPICH's own launcher, hydra, sets MPI_LOCALRANKID, and reads lines
    of any length, also where it uses srun.
    """
    is_pmi2 = "PMI_JOBID" in environ and "MPI_LOCALRANKID" not in environ
    is_several = environ.get("SLURM_STEP_NUM_NODES", "1") != "1"
    return dict(SLURM_VARIABLES) if is_pmi2 and is_several else {}


# States of a rank; "" until it calls tfscale.init.
STARTING = "starting"  # in tfscale.init, which waits for all ranks of the launcher
WAITING = "waiting"  # init gave up waiting for the other ranks
ALONE = "alone"  # a job of its own, whose end concerns no other rank
JOINED = "joined"  # the other ranks need this one
LEAVING = "leaving"  # the program has ended or called shutdown, and waits for the other ranks
LEFT = "left"  # others failed because they still needed this rank
TOLD = "told"  # it ends because communication failed; another rank may be the cause
FINISHED = "finished"  # all ranks have left the job together
RAISED = "raised"  # as FINISHED, but this rank left while an exception was being handled

# Bytes of the file's texts, one after another. custom_ops/comm/status_file.h writes the place (the
# last collective), and the reason why a collective failed.
_SIZES = {"state": 32, "request": 32, "place": 448, "failed": 512, "training": 128, "error": 65536}
_OFFSETS = dict(zip(_SIZES, itertools.accumulate(_SIZES.values(), initial=0), strict=False))


@dataclass(frozen=True)
class RankStatus:
    """Contents of a rank's status file: one of the states above, and texts that may be empty."""

    state: str
    place: str = ""  # the last collective that was finished, and how often it had run
    error: str = ""  # traceback of the exception that ended the rank
    # The rank was asked to save and stop, or did so with all others: exit code 75 is genuine.
    was_asked: bool = False
    training: str = ""  # numbers of its last `fit`, see `write_training`
    has_saved: bool = False  # it has done as asked, and only has to end
    failed: str = ""  # why a collective failed; the program may have caught that error


def create() -> int:
    """Return the descriptor of a new, empty file in memory."""
    descriptor = os.memfd_create("tfscale-rank")
    os.truncate(descriptor, _OFFSETS["error"])
    return descriptor


def path_of(descriptor: int) -> str:
    """Return a path under which other processes of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def read(descriptor: int) -> RankStatus:
    """Return the status that a rank left in its file."""

    def text(name: str) -> str:
        data = os.pread(descriptor, _SIZES[name], _OFFSETS[name])
        return data.partition(b"\0")[0].decode(errors="replace")

    texts = {name: text(name) for name in _SIZES}
    request = texts.pop("request")
    return RankStatus(**texts, was_asked=bool(request), has_saved=request == _SAVED)


@functools.cache
def file_path() -> str:
    """Return the path of this rank's status file, or "" without a process beside this one.

    The variable is removed from the environment: children of this process are not ranks.
    """
    return config.take(STATUS_VARIABLE)


def write_state(state: str) -> None:
    """Write the state of this rank to its status file, if it has one."""
    _write("state", state.encode())


_SAVED = "saved"


def write_request(has_saved: bool = False) -> None:
    """Record that this rank was asked to save and stop, so that its exit code 75 is genuine.

    `has_saved` says that it has done so, with all others, and only has to end.
    """
    _write("request", (_SAVED if has_saved else "asked").encode())


def write_training(
    waiting: float, step_bytes: float, exchange: str, is_crowded: bool = False, bits: int = 32
) -> None:
    """Record a `fit` for the closing lines of `tfscale run`.

    Args:
        waiting: Share of the time of steps in which the rank waited for communication, in [0, 1].
        step_bytes: Bytes that a step exchanges.
        exchange: Name of the strategy, without spaces.
        is_crowded: Whether more ranks than cores share this host.
        bits: Of a value that is sent.
    """
    words = (f"{waiting:.4f}", f"{step_bytes:.0f}", exchange, int(is_crowded), bits)
    _write("training", " ".join(map(str, words)).encode())


def write_error(text: str) -> None:
    """Write the reason why this rank ends; later texts are ignored."""
    path = file_path()
    with contextlib.suppress(OSError):
        if path and os.path.getsize(path) <= _OFFSETS["error"]:
            _write("error", text.encode()[-_SIZES["error"] :])


def _write(name: str, data: bytes) -> None:
    path = file_path()
    if not path:
        return
    # The process beside this rank may have been killed; then this rank is about to end too.
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        file.seek(_OFFSETS[name])
        file.write(data[: _SIZES[name]].ljust(_SIZES[name], b"\0"))


logger = logging.getLogger("tfscale")

_FAILURE = 1  # exit code of a job in which a rank raised
_YIELD_S = 1.0
_DRAIN_S = 0.3

_abort: Callable[[int], None] | None = None
_tell: Callable[[str], None] | None = None
_is_watching = False


def watch_from_import() -> None:
    """Read the launcher's variables, and end the job if a rank raises before `tfscale.init`.

    The other ranks would wait for it in `init`: MPI's launchers ignore a process that exits before
    it has started MPI, but they end the job when a process is killed.
    """
    file_path()  # before this process starts others
    environ = config.environment()
    launch = discover(environ)
    if launch is not None:
        # MPI reads them when it starts; names that are set stay.
        config.set_default_environment(**slurm_variables(environ))
        config.set_environment(RANK_VARIABLE, f"{os.getpid()}:{_connection(environ)}")
    if launch is not None and launch.size > 1:
        end_job_on_error(lambda code: os.kill(os.getpid(), signal.SIGKILL))


def end_job_on_error(
    abort: Callable[[int], None] | None, tell: Callable[[str], None] | None = None
) -> None:
    """End all ranks when this one raises: the others would wait for it.

    `abort` ends all processes of the job with an exit code; None lets this process end alone.
    `tell` sends the others the reason when communication failed, so that a rank that is leaving
    does not wait for this one. Both replace those given before.
    """
    global _abort, _tell, _is_watching
    _abort, _tell = abort, tell
    if _is_watching or abort is None:
        return
    _is_watching = True
    previous, process_id = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process_id or _abort is None:  # a forked child is not a rank
            previous(kind, error, trace)
            return
        # In a step of the user's own it is TensorFlow's error with the engine's text.
        _, mark, text = str(error).rpartition("TFSCALE_FAILED: ")
        is_told = issubclass(kind, ExchangeError) or bool(mark)
        if file_path():
            write_error("".join(traceback.format_exception(kind, error, trace)))
            if is_told:
                write_state(TOLD)
                _tell_others(text.partition("\n")[0])
            if previous is not sys.__excepthook__:
                previous(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_FAILURE)  # The process beside this one shows the error, and ends the others.
        if is_told:
            # Most likely another rank failed first. It is about to end this one, and its
            # traceback, which shows the cause, should be the last one.
            time.sleep(_YIELD_S)
        previous(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        # The launcher drops what it has not read yet when the job is aborted.
        time.sleep(_DRAIN_S)
        _abort(_FAILURE)

    sys.excepthook = hook


def _tell_others(why: str) -> None:
    """Notify the other ranks that this one ends, and give them a moment to end before it."""

    def tell() -> None:
        with contextlib.suppress(ExchangeError):  # for example, the engine was shut down
            if _tell is not None:
                _tell(why)

    threading.Thread(target=tell, daemon=True).start()
    time.sleep(_YIELD_S)


@contextlib.contextmanager
def deadline_of_start(settings: config.Settings, what: str) -> Iterator[None]:
    """Warn, and finally end this process, while the call `what` waits for other ranks to start.

    MPI's start-up waits for all ranks without a limit, and under some launchers even for one that
    has already ended. Only the end of this process interrupts it.
    """
    warning_s, shutdown_s = settings.stall_warning_s, settings.stall_shutdown_s
    text = f"{what} has waited %.0f s for ranks that did not call it yet, or ended before.%s"

    def end() -> None:
        logger.error(text, shutdown_s, " This rank ends. Look for the first error above.")
        write_error(f"tfscale: {text % (shutdown_s, '')}\n")
        write_state(WAITING)
        os._exit(_FAILURE)

    actions = ((warning_s, lambda: logger.warning(text, warning_s, "")), (shutdown_s, end))
    timers = [threading.Timer(s, action) for s, action in actions if math.isfinite(s)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
