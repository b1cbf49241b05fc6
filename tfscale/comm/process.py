"""This process within its job: launch variables, status file, and the end after an error."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

from tfscale import config
from tfscale.config import ExchangeError

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


# States of a rank. "": tfscale.init has not returned. WAITING: it has not, for want of others.
# ALONE: a job of its own, which may end as it likes. JOINED: the others count on it. TOLD: it ends
# because communication failed, which another rank may be the cause of. FINISHED: all have left the
# job together. RAISED: they have, while an exception was on its way.
WAITING = "waiting"
ALONE = "alone"
JOINED = "joined"
TOLD = "told"
FINISHED = "finished"
RAISED = "raised"

# Where things stand in the file; custom_ops/comm/status_file.h writes the place.
_STATE_BYTES = 64
_PLACE_BYTES = 448
_ERROR_BYTES = 1 << 16


@dataclass(frozen=True)
class RankStatus:
    """What a rank left.

    Attributes:
        state: One of those above.
        place: The last collective that was finished, and how often it had run; may be empty.
        error: Traceback of the exception that ended the rank; may be empty.
    """

    state: str
    place: str
    error: str


def create() -> int:
    """Return the descriptor of a new, empty file in memory."""
    descriptor = os.memfd_create("tfscale-rank")
    os.truncate(descriptor, _STATE_BYTES + _PLACE_BYTES)
    return descriptor


def path_of(descriptor: int) -> str:
    """Return a path under which other processes of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def read(descriptor: int) -> RankStatus:
    """Return what a rank left in its file."""

    def text(n_bytes: int, offset: int) -> str:
        return os.pread(descriptor, n_bytes, offset).partition(b"\0")[0].decode(errors="replace")

    return RankStatus(
        text(_STATE_BYTES, 0),
        text(_PLACE_BYTES, _STATE_BYTES),
        text(_ERROR_BYTES, _STATE_BYTES + _PLACE_BYTES),
    )


@functools.cache
def file_path() -> str:
    """Return the path of this rank's file, or "" where nobody looks after it.

    It is taken out of the environment: what this process starts is no rank.
    """
    return config.take(STATUS_VARIABLE)


def is_watched() -> bool:
    """Return whether a process looks after this rank: then it ends the others if need be."""
    return bool(file_path())


def write_state(state: str) -> None:
    """Tell in which state this rank is; does nothing where nobody looks after it."""
    _write(state.encode().ljust(_STATE_BYTES, b"\0"), 0)


def write_error(text: str) -> None:
    """Leave the text that says why this rank ends; the first one counts."""
    offset = _STATE_BYTES + _PLACE_BYTES
    path = file_path()
    with contextlib.suppress(OSError):
        if path and os.path.getsize(path) <= offset:
            _write(text.encode()[-_ERROR_BYTES:], offset)


def _write(data: bytes, offset: int) -> None:
    path = file_path()
    if not path:
        return
    # The one who looks may have been killed; this rank ends in a moment then.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)


logger = logging.getLogger("tfscale")

_FAILURE = 1  # exit code of a job in which a rank raised
_YIELD_S = 1.0
_DRAIN_S = 0.3


_abort: Callable[[int], None] | None = None
_is_watching = False


def watch_from_import() -> None:
    """End the job also where a rank raises before `tfscale.init`, if a launcher started several.

    The others would wait for it in `init`, and MPI's launchers do not mind a process that ends
    before it has started MPI, but they end the job when one is killed.
    """
    file_path()  # before this process starts others
    launch = discover(config.environment())
    if launch is not None and launch.size > 1:
        end_job_on_error(_kill_this_process)


def do_not_watch() -> None:
    """Let this process end alone: it is a job of its own."""
    global _abort
    _abort = None


def end_job_on_error(abort: Callable[[int], None]) -> None:
    """End all ranks when this one raises: the others would wait for it.

    Args:
        abort: Ends all processes of the job with an exit code; replaces the last one given.
    """
    global _abort, _is_watching
    _abort = abort
    if _is_watching:
        return
    _is_watching = True
    previous, process_id = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process_id:  # a forked child is no rank
            previous(kind, error, trace)
            return
        if issubclass(kind, ExchangeError):
            # Most likely another rank failed first. It ends this one in a moment, and its
            # traceback, which says why, is to be the last one.
            time.sleep(_YIELD_S)
        previous(kind, error, trace)
        if _abort is None:
            return
        write_error("".join(traceback.format_exception(kind, error, trace)))
        if issubclass(kind, ExchangeError):
            write_state(TOLD)
        sys.stdout.flush()
        sys.stderr.flush()
        if is_watched():
            os._exit(_FAILURE)  # Whoever watches says so last, and ends the others.
        # The launcher drops what it has not read yet when the job is aborted.
        time.sleep(_DRAIN_S)
        _abort(_FAILURE)

    sys.excepthook = hook


def _kill_this_process(code: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def deadline_of_start(
    warning_s: float, shutdown_s: float, what: str = "tfscale.init()"
) -> Iterator[None]:
    """Bound the time for which ranks wait for each other to start.

    MPI waits in its own start-up for all ranks, without a limit, and some launchers let them wait
    for one that ended before. Nothing can interrupt it but the end of this process.

    Args:
        warning_s: Seconds until a warning.
        shutdown_s: Seconds until this process ends, with exit code 1; infinite for never.
        what: The call that waits.
    """
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
