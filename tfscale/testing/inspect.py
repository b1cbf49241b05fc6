"""Looks into the running job of a rank, for tests about messages rather than results.

Names of collectives say whose they are: `"gradients kernel, bias"`, `"parameters dense/kernel"`,
`"average of parameters"`, or what the caller of `tfscale.allreduce(name=...)` gave.

Examples:
    >>> tfscale.init()
    >>> total = tfscale.allreduce(tf.ones([8]), name="total")
    >>> tfscale.testing.inspect.backend_name(), tfscale.testing.inspect.take_collectives()
    ('single', [])
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple


class Collective(NamedTuple):
    """A collective that this rank took part in; times are of this rank's clock.

    Attributes:
        name: Name in timelines and errors; "eager collective" outside of traced functions.
        bytes: Size of this rank's part.
        posted_ns: Time at which its inputs existed.
        started_ns: Time at which it began to send or receive.
        ended_ns: Time at which its result existed.
        plan: Number of the traced function; -1 outside of traced functions.
        slot: Number in the function, in the order of tracing.
    """

    name: str
    bytes: int
    posted_ns: int
    started_ns: int
    ended_ns: int
    plan: int
    slot: int


def backend_name() -> str:
    """Return the library that carries the messages: "engine", "horovod", or "single" for none."""
    return backend().name


def backend() -> Any:
    """Return the object that carries the messages, a `tfscale.comm.backends.base.Backend`."""
    return _runtime().backend()


def call(name: str) -> Any:
    """Return a call of all ranks, for methods of `backend()`."""
    from tfscale.comm.backends.base import Call

    return Call(_runtime().world(), name)


def clock_ns() -> int:
    """Return the time, in nanoseconds, of the clock that collectives are measured with."""
    return backend().clock_ns()


def take_collectives() -> list[Collective]:
    """Return the collectives that ended since the last call, in the order of their ends.

    Empty without the engine, which alone records them.
    """
    from tfscale.trace import events

    if not events.has_events():
        return []
    records = events.drain()
    times = ("bytes", "posted_ns", "started_ns", "ended_ns", "plan", "slot")
    rows = zip(*(records[records["slot"] >= 0][name].tolist() for name in times), strict=True)
    return [Collective(backend().slot_name(*row[-2:]), *row) for row in rows]


def listen() -> Any:
    """Return an object whose `take()` returns the engine's raw events from now on, as an array.

    They include stamps, which have negative slots: the times at which computation came to a place.
    """
    from tfscale.trace.events import Listener

    return Listener()


def name_of(plan: int, slot: int) -> str:
    """Return the name of a collective."""
    return backend().slot_name(plan, slot)


def graph_of(plan: int) -> Any:
    """Return the graph of the traced function that has a plan; None where it is not in use."""
    return backend().graph_of(plan)


def pending_gathers() -> int:
    """Return the number of parameters that have been posted, and have not arrived on this rank."""
    return backend().num_pending()


def failed_gathers() -> int:
    """Return the number of parameters whose last gather failed, or was given up."""
    return backend().num_failed()


def wait_for_gathers() -> None:
    """Wait until no gather is pending on this rank; a failure is left to readers."""
    backend().drain()


def leave_steps() -> None:
    """Notify the other ranks that this one stopped: they give up steps that it does not take."""
    from tfscale.comm.backends.base import MarkKind

    backend().mark(MarkKind.STOP)


def return_to_steps() -> None:
    """Begin again after `leave_steps`, as the next `fit` does. Collective."""
    _runtime().start_incarnation()


def raw_variable(variable: Any) -> Any:
    """Return TensorFlow's variable in a Keras variable, which does not wait for a gather."""
    from tfscale.internals import keras

    return keras.raw_variable(variable)


def dense_route(layer: Any) -> str:
    """Return how a dense layer of a prepared model exchanges: "weights", "partial" or "replicated".

    See `dense` of `tfscale.Sharded`.
    """
    from tfscale.exchange import dense

    kind_of_call = {dense.PartialCall: "partial", dense.ReplicatedCall: "replicated"}
    return kind_of_call.get(type(vars(layer).get("call")), "weights")


def forget_training() -> None:
    """Let `tfscale.join` be called in a process that has trained before."""
    from tfscale.comm import eager

    eager._has_traced_gradients = False


@contextlib.contextmanager
def isolated_job() -> Iterator[None]:
    """Return to the job before the block, or to none, without leaving that of the block."""
    runtime = _runtime()
    before = runtime._state
    try:
        yield
    finally:
        runtime._state = before


def process_sets() -> list[Any]:
    """Return the process sets of the job, with those that the library made for itself."""
    return list(_runtime().known_process_sets())


def forget_process_sets() -> None:
    """Remove all sets of the program, so that the same ranks can be added again. Collective."""
    for process_set in process_sets():
        if type(process_set) is _runtime().ProcessSet:  # others are the library's own
            _runtime().remove_process_set(process_set)


def _runtime() -> Any:
    from tfscale.comm import runtime  # imports TensorFlow, which processes that only spawn lack

    return runtime
