"""Joining the job: rank, size, start and end, and what happens when a rank fails."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfscale import config
from tfscale.backends.base import Backend, Group, MarkKind
from tfscale.backends.single import SingleBackend
from tfscale.backends.start import look_around, start
from tfscale.end_of_job import do_not_watch, end_job_on_error
from tfscale.errors import ConfigError, ExchangeError
from tfscale.launcher import rank_status
from tfscale.launcher.launch import discover, require_size
from tfscale.placement import Machine, choose_backend


@dataclass
class _State:
    """What `init` made; there is one per process."""

    backend: Backend
    process_id: int = field(default_factory=os.getpid)
    incarnation: int = 0
    n_refused: int = 0
    process_sets: list[Any] = field(default_factory=list)


_state: _State | None = None


def init(
    comm: Any = None, process_sets: Sequence[Any] | str | None = None, backend: str = "auto"
) -> None:
    """Join the job. Collective: all ranks must call this, before any other call.

    A process that no launcher started is a job of its own: no MPI, no thread. Calling init
    again does nothing.

    Args:
        comm: Who takes part: None for all processes, an mpi4py communicator, or a list of the
            world's ranks (only these may call; the others start MPI too, as by importing
            mpi4py's MPI, since it starts on all processes together).
        process_sets: `ProcessSet` objects or lists of ranks to add. Sets may always be added
            later, too: Horovod's "dynamic" is accepted.
        backend: "auto", "engine" (MPI), "horovod" (Gloo, NCCL or MPI) or "single"; "auto" reads
            TFSCALE_BACKEND, then chooses: see `tfscale.placement.choose_backend`.

    Raises:
        ConfigError: An argument or environment variable does not fit.
        ExchangeError: MPI or the native library cannot be used.
    """
    global _state
    if _state is not None:
        return
    settings, process_sets = config.settings(), _check_process_sets(process_sets)
    name = settings.backend if backend == "auto" else backend
    launch = discover(config.environment())
    if name not in config.BACKENDS:
        raise ConfigError(
            f"backend must be one of {', '.join(config.BACKENDS)}. Received: {backend!r}."
        )
    is_parallel = comm is not None or (launch is not None and launch.size > 1)
    machine = look_around() if name == "auto" and is_parallel else Machine()
    chosen = choose_backend(name, launch, is_parallel, machine)
    if chosen == "single":
        _state = _State(SingleBackend())
        do_not_watch()
    else:
        _state = _State(start(chosen, settings, comm))
        end_job_on_error(_abort)
        if comm is None:
            require_size(launch, size())
    if chosen == "horovod":  # the engine has compared them
        from tfscale.versions import compare

        compare()
    is_alone = chosen == "single" and launch is not None and launch.size > 1
    rank_status.write_state(rank_status.ALONE if is_alone else rank_status.JOINED)
    atexit.register(_leave_at_exit)
    if settings.timeline and not is_single():
        from tfscale.trace import timeline

        timeline.start_automatic(settings.timeline)
    _add_process_sets(process_sets)


def _abort(code: int) -> None:
    if _state is not None:
        _state.backend.abort(code)


def _add_process_sets(process_sets: Sequence[Any] | None) -> None:
    from tfscale.process_sets import add_process_set, global_process_set

    global_process_set.ranks, global_process_set.process_set_id = list(range(size())), 0
    for process_set in process_sets or ():
        add_process_set(process_set)


def _check_process_sets(process_sets: Any) -> Sequence[Any] | None:
    """Return the sets to add; Horovod's "dynamic", which says that sets come later, is none."""
    if not isinstance(process_sets, str):
        return process_sets
    if process_sets.lower() == "dynamic":
        return None
    raise ConfigError(
        "process_sets must be a list of ProcessSet objects or of lists of ranks, or 'dynamic' for "
        f"sets that come later. Received: {process_sets!r}."
    )


def _leave_at_exit() -> None:
    """Leave the job when the program ends; where others never come, it ends as by an error."""
    global _state
    state = _state
    try:
        shutdown()
    except ExchangeError as error:
        _state = state  # The hook ends the job through it.
        sys.excepthook(type(error), error, error.__traceback__)


def shutdown() -> None:
    """Leave the job; waits until all ranks do (engine). A second call does nothing.

    Horovod does not wait: what other ranks exchange afterwards fails there.

    Raises:
        ExchangeError: A rank does not come, and gives no sign of life for the time of
            TFSCALE_STALL_SHUTDOWN_S.
    """
    global _state
    if _state is None or _state.process_id != os.getpid():
        return  # A forked child is no rank, and has no communication thread.
    from tfscale.process_sets import global_process_set
    from tfscale.trace import timeline

    folder = timeline.write_part()
    state, _state = _state, None
    for process_set in state.process_sets:
        process_set.process_set_id = None
    global_process_set.ranks = global_process_set.process_set_id = None
    if state.backend.close():
        error = sys.exc_info()[1]  # `finally: tfscale.shutdown()`
        is_raising = error is not None and not isinstance(error, SystemExit)
        rank_status.write_state(rank_status.RAISED if is_raising else rank_status.FINISHED)
    if folder is not None and state.backend.rank == 0:
        timeline.merge_at_end(folder, state.backend.size)  # Closing waited for all ranks.


def known_process_sets() -> list[Any]:
    """Return the process sets of the job, to which others are added; `shutdown` ends them."""
    return _current().process_sets


def _current() -> _State:
    if _state is None:
        raise ExchangeError(
            "tfscale must be initialised first. Received: a call before tfscale.init() or after "
            "shutdown(). Call tfscale.init() at the start of the program."
        )
    return _state


def backend() -> Backend:
    """Return the backend of the job.

    Raises:
        ExchangeError: tfscale is not initialised (as all functions below).
    """
    return _current().backend


def world() -> Group:
    """Return the group of all ranks."""
    current = backend()
    return Group(0, tuple(range(current.size)), current.rank)


def mark(kind: MarkKind) -> None:
    """Tell the other ranks that this one takes part in no further step for now."""
    backend().mark(kind)


def count_given_up() -> None:
    """Note a step that was given up before any collective of it was called."""
    _current().n_refused += 1


def num_given_up() -> int:
    """Return how many collectives and steps were given up since the incarnation began."""
    return backend().num_given_up() + _current().n_refused


def start_incarnation() -> None:
    """Separate what comes from what is left of a step that was given up; all ranks call this."""
    state = _current()
    state.incarnation += 1
    state.n_refused = 0
    state.backend.start_incarnation(state.incarnation)


def is_initialized() -> bool:
    """Return whether this process has joined a job."""
    return _state is not None


def rank() -> int:
    """Return the number of this process, in [0, size())."""
    return backend().rank


def size() -> int:
    """Return the number of processes."""
    return backend().size


def local_rank() -> int:
    """Return the number of this process among those of its host."""
    return backend().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return backend().local_size


def cross_rank() -> int:
    """Return the number of this host among those that have a rank with this local rank."""
    return backend().cross_rank


def cross_size() -> int:
    """Return how many hosts have a rank with this local rank: all, where all have equally many."""
    return backend().cross_size


def is_single() -> bool:
    """Return whether there is one process, so that nothing is ever exchanged."""
    return backend().size == 1
