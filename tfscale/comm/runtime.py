"""The job of this process: its backend, rank, size and process sets."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale import config
from tfscale.comm.backends.base import Backend, Group, ReduceOp, Reduction
from tfscale.comm.process import deadline_of_start
from tfscale.config import ConfigError, ExchangeError

Average = "Average"
"""The mean over ranks.

Examples:
    >>> tfscale.init()
    >>> ranks = tfscale.testing.FakeRanks(3)  # three ranks in one process, with the values 2, 3, 4
    >>> ranks.run(lambda rank: float(tfscale.allreduce(rank + 2.0, op=tfscale.Average)))
    [3.0, 3.0, 3.0]
"""
Sum = "Sum"
"""The sum.

Examples:
    >>> tfscale.init()
    >>> ranks = tfscale.testing.FakeRanks(3)  # three ranks in one process, with the values 2, 3, 4
    >>> ranks.run(lambda rank: float(tfscale.allreduce(rank + 2.0, op=tfscale.Sum)))
    [9.0, 9.0, 9.0]
"""
Min = "Min"
"""The least, element by element.

Examples:
    >>> tfscale.init()
    >>> ranks = tfscale.testing.FakeRanks(3)  # three ranks in one process, with the values 2, 3, 4
    >>> ranks.run(lambda rank: float(tfscale.allreduce(rank + 2.0, op=tfscale.Min)))
    [2.0, 2.0, 2.0]
"""
Max = "Max"
"""The largest, element by element.

Examples:
    >>> tfscale.init()
    >>> ranks = tfscale.testing.FakeRanks(3)  # three ranks in one process, with the values 2, 3, 4
    >>> ranks.run(lambda rank: float(tfscale.allreduce(rank + 2.0, op=tfscale.Max)))
    [4.0, 4.0, 4.0]
"""
Product = "Product"
"""The product.

Examples:
    >>> tfscale.init()
    >>> ranks = tfscale.testing.FakeRanks(3)  # three ranks in one process, with the values 2, 3, 4
    >>> ranks.run(lambda rank: float(tfscale.allreduce(rank + 2.0, op=tfscale.Product)))
    [24.0, 24.0, 24.0]
"""

_ENGINE_OPS = {Average: ReduceOp.SUM, **{op.name.capitalize(): op for op in ReduceOp}}
_REDUCIBLE = (
    *(tf.float32, tf.float64, tf.float16, tf.bfloat16),
    *(tf.int32, tf.int64, tf.int8, tf.uint8),
)


def reduction_of(op: str, size: int, prescale: float = 1.0, postscale: float = 1.0) -> Reduction:
    """Return the reduction of `size` ranks; an average is a scaled sum."""
    if op not in _ENGINE_OPS:
        raise ConfigError(f"op must be one of {', '.join(_ENGINE_OPS)}. Received: op={op!r}.")
    return Reduction(_ENGINE_OPS[op], prescale, postscale / size if op == Average else postscale)


def require_reducible(tensors: Sequence[tf.Tensor]) -> None:
    """Raise ConfigError unless all dtypes can be reduced."""
    for tensor in tensors:
        if tensor.dtype not in _REDUCIBLE:
            raise ConfigError(
                "dtype must be float32, float64, float16, bfloat16, int32, int64, int8 or "
                f"uint8. Received: dtype={tensor.dtype.name}. Cast the tensor first."
            )


class ProcessSet:
    """A set of ranks, usable in collectives once `add_process_set` or `init` registered it.

    Attributes:
        ranks: Its ranks in ascending order; None for the global set before `init`.
        process_set_id: Number of the set, equal on all ranks; None before it is known.
        mpi_comm: The communicator that gives the ranks, or None.

    Examples:
        >>> first = tfscale.ProcessSet([0])
        >>> tfscale.init(process_sets=[first])
        >>> first.included(), first.rank(), first.size()
        (True, 0, 1)
        >>> float(tfscale.allreduce(3.0, process_set=first))
        3.0
    """

    def __init__(self, ranks: Any) -> None:
        """Describe a set.

        Args:
            ranks: Distinct ranks, in any order; or an mpi4py communicator, for
                `init(process_sets=...)`. Ranks may pass different ones, such as parts of a split.

        Raises:
            ConfigError: A rank is negative or named twice, or there is none.
        """
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm = ranks if hasattr(ranks, "py2f") else None
        if ranks is not None and self.mpi_comm is None:
            self.ranks = sorted(int(r) for r in ranks)
            if not self.ranks or self.ranks[0] < 0 or len(set(self.ranks)) < len(self.ranks):
                raise ConfigError(
                    "ranks must be distinct, 0 or greater, and at least one. Received: "
                    f"ranks={list(ranks)}."
                )

    def register(self, ranks: list[int] | None, process_set_id: int | None) -> None:
        """Record its ranks and number in the job, or None where it is out of use."""
        self.ranks, self.process_set_id = ranks, process_set_id

    def group(self) -> Group:
        """Return the set as backends know it; raises ExchangeError until it is added."""
        if self is global_process_set:
            return world()
        if self.process_set_id is None or self.ranks is None:
            raise ExchangeError(
                f"process_set must be added before it is used. Received: ranks={self.ranks}. "
                "Call tfscale.add_process_set(...) or init(process_sets=[...])."
            )
        rank_in_set = self.ranks.index(rank()) if rank() in self.ranks else -1
        return Group(self.process_set_id, tuple(self.ranks), rank_in_set)

    def included(self) -> bool:
        """Return whether this process belongs to the set."""
        return self.group().rank >= 0

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return self.group().size

    def rank(self) -> int:
        """Return this process's number within the set, or -1 outside of it."""
        return self.group().rank

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks}, id={self.process_set_id})"


global_process_set = ProcessSet(None)
"""All ranks.

Examples:
    >>> tfscale.init()
    >>> tfscale.global_process_set.ranks
    [0]
    >>> tfscale.global_process_set.size() == tfscale.size()
    True
"""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks usable. Collective: all ranks must call this, in the same order.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, with its id.

    Raises:
        ConfigError: A rank is not in [0, size), or a set of these ranks is known already.

    Examples:
        >>> tfscale.init()
        >>> even = tfscale.add_process_set(range(0, tfscale.size(), 2))
        >>> if even.included():
        ...     print(float(tfscale.allreduce(5.0, process_set=even)))
        5.0
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if process_set.process_set_id is not None or process_set is global_process_set:
        raise ConfigError(f"process_set was added before. Received: {process_set!r}.")
    if process_set.mpi_comm is not None and not ranks:
        raise ConfigError(
            f"process_set of a communicator needs init. Received: {process_set!r}. Call "
            "tfscale.init(process_sets=[...]), or name the ranks."
        )
    if any(type(s) is type(process_set) and s.ranks == ranks for s in known_process_sets()):
        raise ConfigError(
            f"ranks are a process set already. Received: ranks={ranks}. Use the set that "
            "add_process_set returned, or remove it first."
        )
    if ranks[-1] >= size():
        raise ConfigError(f"ranks must lie in [0, {size()}). Received: ranks={ranks}.")
    with deadline_of_start(config.settings(), "tfscale.add_process_set()"):
        process_set.register(process_set.ranks, backend().add_group(ranks))
    known_process_sets().append(process_set)
    return process_set


class _OwnProcessSet(ProcessSet):
    """A set that tfscale made for itself: a program has no reference to remove it by."""


def own_process_set(ranks: Sequence[int]) -> ProcessSet:
    """Return tfscale's own set of these ascending ranks, made once. Collective.

    MPI has a limited number of communicators, so the optimizers of a hyperparameter search share
    one.
    """
    for process_set in known_process_sets():
        if isinstance(process_set, _OwnProcessSet) and process_set.ranks == list(ranks):
            return process_set
    return add_process_set(_OwnProcessSet(ranks))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set out of use. Collective: all ranks must call this, in the same order.

    Args:
        process_set: A set that was added.

    Returns:
        True if it was registered; False for the global set and for any other set.

    Examples:
        >>> tfscale.init()
        >>> first = tfscale.add_process_set([0])
        >>> tfscale.remove_process_set(first)
        True
        >>> tfscale.remove_process_set(tfscale.global_process_set)
        False
    """
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    group = process_set.process_set_id
    process_set.register(process_set.ranks, None)
    known_process_sets().remove(process_set)
    eager_calls().pop(group, None)
    backend().remove_group(group)
    return True


@dataclass
class _State:
    """The job that `init` joined; there is one per process."""

    backend: Backend
    process_id: int = field(default_factory=os.getpid)
    incarnation: int = 0
    n_refused: int = 0
    has_ended_fit: bool = False  # since ranks last compared what they gave up
    process_sets: list[Any] = field(default_factory=list)
    eager_calls: Counter[int] = field(default_factory=Counter)
    listeners: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def refuse(self) -> None:
        """Count a step that was given up before it called a collective."""
        self.n_refused += 1

    def note_end_of_fit(self, has_ended: bool) -> None:
        """Note that a `fit` has ended, or that ranks have compared what they gave up in it."""
        self.has_ended_fit = has_ended

    def start_incarnation(self) -> None:
        """Separate later collectives from those left of a step that was given up."""
        self.incarnation, self.n_refused = self.incarnation + 1, 0
        self.eager_calls.clear()
        self.backend.start_incarnation(self.incarnation)


_state: _State | None = None


def enter(backend: Backend) -> None:
    """Begin the job of this process, on a backend that the caller has started."""
    global _state
    _state = _State(backend)
    global_process_set.register(list(range(backend.size)), 0)


def leave() -> None:
    """Forget the job and its process sets; its backend is closed by the caller."""
    global _state
    state, _state = _current(), None
    for process_set in state.process_sets:
        process_set.register(process_set.ranks, None)
    global_process_set.register(None, None)


def known_process_sets() -> list[Any]:
    """Return the job's own list of process sets; callers append new ones, `shutdown` ends all."""
    return _current().process_sets


def eager_calls() -> Counter[int]:
    """Return the numbers of eager collectives that this rank began, by group, to be changed."""
    return _current().eager_calls


def listeners() -> weakref.WeakSet[Any]:
    """Return the objects that receive the job's events, see `tfscale.trace.events`."""
    return _current().listeners


def _current() -> _State:
    if _state is None:
        raise ExchangeError(
            "tfscale must be initialised first. Received: a call before tfscale.init() or after "
            "shutdown(). Call tfscale.init() at the start of the program."
        )
    return _state


def backend() -> Backend:
    """Return the backend; before `init`, ExchangeError is raised here and in functions below."""
    return _current().backend


def world() -> Group:
    """Return the group of all ranks."""
    current = backend()
    return Group(0, tuple(range(current.size)), current.rank)


def count_given_up() -> None:
    """Count a step that was given up before it called a collective."""
    _current().refuse()


def num_given_up() -> int:
    """Return the number of collectives and steps given up since the incarnation began."""
    return backend().num_given_up() + _current().n_refused


def note_end_of_fit(has_ended: bool = True) -> None:
    """Note that a `fit` has ended, or that ranks have compared what they gave up in it."""
    _current().note_end_of_fit(has_ended)


def has_ended_fit() -> bool:
    """Return whether a `fit` has ended since ranks last compared what they gave up."""
    return _current().has_ended_fit


def start_incarnation() -> None:
    """Separate later collectives from those left of a step that was given up. Collective."""
    _current().start_incarnation()


def is_initialized() -> bool:
    """Return whether this process has joined a job.

    Examples:
        >>> tfscale.is_initialized()
        False
        >>> tfscale.init()
        >>> tfscale.is_initialized()
        True
    """
    return _state is not None


def is_forked() -> bool:
    """Return whether this process was forked by a rank: it is not a rank and has no engine."""
    return _state is not None and _state.process_id != os.getpid()


def rank() -> int:
    """Return the number of this process, in [0, size()).

    Examples:
        >>> tfscale.init()
        >>> tfscale.rank()
        0
        >>> 2 if tfscale.rank() == 0 else 0  # `verbose` of `fit`: one rank prints
        2
    """
    return backend().rank


def size() -> int:
    """Return the number of processes.

    Examples:
        >>> tfscale.init()
        >>> tfscale.size()
        1
        >>> 256 // tfscale.size()  # samples of this rank in a batch of 256
        256
    """
    return backend().size


def local_rank() -> int:
    """Return the number of this process among those of its host.

    Examples:
        >>> tfscale.init()
        >>> f"GPU:{tfscale.local_rank()}"  # a device for each rank of a host
        'GPU:0'
    """
    return backend().local_rank


def local_size() -> int:
    """Return the number of processes on this host.

    Examples:
        >>> tfscale.init()
        >>> 16 // tfscale.local_size()  # threads of this rank on a host with 16 cores
        16
    """
    return backend().local_size


def cross_rank() -> int:
    """Return the number of this host among those that have a rank with this local rank.

    Examples:
        >>> tfscale.init()
        >>> f"host {tfscale.cross_rank()} of {tfscale.cross_size()}"
        'host 0 of 1'
    """
    return backend().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank.

    Examples:
        >>> tfscale.init()
        >>> tfscale.cross_size()
        1
    """
    return backend().cross_size


def is_single() -> bool:
    """Return whether there is one process, so that nothing is ever exchanged."""
    return backend().size == 1


def _int_op(read: Callable[[], int]) -> tf.Tensor:
    """Return a scalar that is read when the graph runs, as Horovod's ops of this kind."""
    value = tf.numpy_function(lambda: np.int32(read()), [], tf.int32)
    return tf.ensure_shape(value, [])


def _set_of(process_set_id: int) -> ProcessSet:
    for process_set in (global_process_set, *known_process_sets()):
        if process_set.process_set_id == process_set_id:
            return process_set
    raise ExchangeError(
        "process_set_id must be that of an added set. Received: "
        f"process_set_id={process_set_id}. Call tfscale.add_process_set(...)."
    )


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return `rank()` as an int32 scalar that is read when the graph runs.

    Examples:
        >>> tfscale.init()
        >>> @tf.function(autograph=False)
        ... def seed_of_rank(seed):
        ...     return seed + tfscale.rank_op()
        >>> int(seed_of_rank(7))
        7
    """
    return _int_op(rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the size of a process set as an int32 scalar that is read when the graph runs.

    Examples:
        >>> tfscale.init()
        >>> @tf.function(autograph=False)
        ... def rows_of_rank(rows):
        ...     return rows // tfscale.size_op()
        >>> int(rows_of_rank(12))
        12
    """
    return _int_op(lambda: _set_of(process_set_id).size())


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return `local_rank()` as an int32 scalar that is read when the graph runs.

    Examples:
        >>> tfscale.init()
        >>> @tf.function(autograph=False)
        ... def is_first_of_host():
        ...     return tfscale.local_rank_op() == 0
        >>> bool(is_first_of_host())
        True
    """
    return _int_op(local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return `local_size()` as an int32 scalar that is read when the graph runs.

    Examples:
        >>> tfscale.init()
        >>> @tf.function(autograph=False)
        ... def cores_of_rank(cores):
        ...     return cores // tfscale.local_size_op()
        >>> int(cores_of_rank(16))
        16
    """
    return _int_op(local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 on ranks of a process set and 0 on others, read when the graph runs.

    Examples:
        >>> tfscale.init()
        >>> first = tfscale.add_process_set([0])
        >>> @tf.function(autograph=False)
        ... def is_included():
        ...     return tfscale.process_set_included_op(first.process_set_id)
        >>> int(is_included())  # 0 on rank 1 and above
        1
    """
    return _int_op(lambda: int(_set_of(process_set_id).included()))
