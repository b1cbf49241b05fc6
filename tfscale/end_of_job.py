"""What happens to the other ranks when one raises, or never comes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from tfscale import config
from tfscale.errors import ExchangeError
from tfscale.launcher import rank_status
from tfscale.launcher.launch import discover

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
    rank_status.file_path()  # before this process starts others
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
        rank_status.write_error("".join(traceback.format_exception(kind, error, trace)))
        if issubclass(kind, ExchangeError):
            rank_status.write_state(rank_status.TOLD)
        sys.stdout.flush()
        sys.stderr.flush()
        if rank_status.is_watched():
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
        rank_status.write_error(f"tfscale: {text % (shutdown_s, '')}\n")
        rank_status.write_state(rank_status.WAITING)
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
