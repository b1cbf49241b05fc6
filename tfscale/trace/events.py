"""Events of the engine, and the clocks that measure them."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.backends.base import Call
from tfscale.config import ExchangeError
from tfscale.internals.keras import by_device, raw_variable
from tfscale.internals.trace import is_function
from tfscale.trace.stamps import INPUT_SLOT, STAMP, has_slot, wait_slot

_lock = threading.Lock()
_N_ROUNDS = 24
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Listener:
    """Receives the events of this job from its creation on, for as long as it is kept.

    Others may drain events in the meantime: each listener receives all of them. With `limit` it
    forgets old events, and keeps at least as many of the newest.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._parts: list[np.ndarray] = []
        self._limit = limit
        if not has_events():
            raise ExchangeError(
                "backend must be 'engine' to time calls. Received: the backend "
                f"{runtime.backend().name!r}. Start with an MPI launcher, or backend='engine'."
            )
        self._none = drain()[:0]
        with _lock:
            self._listeners = runtime.listeners()
            self._listeners.add(self)

    def take(self) -> np.ndarray:
        """Return the events since the last call: an array with the fields of the engine's Event."""
        drain()
        with _lock:
            parts, self._parts = self._parts, []
        return np.concatenate([self._none, *parts])

    def close(self) -> None:
        """Receive no more events."""
        with _lock:
            self._listeners.discard(self)

    def add(self, events: np.ndarray) -> None:
        """Append an array of events, for the next `take`."""
        self._parts.append(events)
        if self._limit is not None:
            surplus = sum(map(len, self._parts)) - self._limit
            while surplus >= len(self._parts[0]):
                surplus -= len(self._parts.pop(0))


def has_events() -> bool:
    """Return whether the backend records its collectives."""
    return runtime.backend().records_events


def drain() -> np.ndarray:
    """Give the engine's new events to the listeners and return them; from any thread."""
    with _lock:
        events = runtime.backend().event_array()
        for listener in runtime.listeners() if len(events) else ():
            listener.add(events)
    return events


def stamp_updates(variables: Sequence[Any]) -> None:
    """Record when an optimizer updates variables: a stamp per exchanged bucket, and for the rest.

    Call it after the update, while a step is traced. A stamp is ordered after the last use of its
    variables and after nothing else. It shows that computation continued while collectives were
    pending whose results it does not need; see `tfscale.measure.analysis`.
    """
    if tf.executing_eagerly() or runtime.is_single() or not has_events():
        return
    graph = tf.compat.v1.get_default_graph()
    raw = [raw_variable(v) for v in variables]
    captured = [graph.capture(v.handle) for v in raw]
    captured_by_name = {handle.name: handle for handle in captured}
    device = {handle.name: v.device for handle, v in zip(captured, raw, strict=True)}
    ops = [op for op in graph.get_operations() if has_slot(op)]
    if not ops:
        return
    n_stamps = sum(op.type == STAMP for op in ops)
    groups = []
    for op in ops:
        handles = [t for t in op.inputs if t.dtype == tf.resource and t.name in captured_by_name]
        if handles and op.type != STAMP:
            groups.append([captured_by_name.pop(handle.name) for handle in handles])
    plan = int(ops[0].get_attr("plan"))
    rest = by_device(captured_by_name.values(), lambda handle: device[handle.name])
    for handles in [*groups, *rest]:
        n_stamps += 1
        runtime.backend().stamp(handles, plan, -n_stamps)
    if n_stamps == len(groups) + len(rest):  # the first update of this function
        _stamp_waits(graph, ops)


def _stamp_waits(graph: tf.Graph, ops: Sequence[tf.Operation]) -> None:
    """Record when the batch exists, and when layers wait for nothing but their parameters."""
    if not is_function(graph):
        return
    captured = {tensor.name for tensor in graph.internal_captures}
    arguments = [t for t in graph.inputs if t.name not in captured]
    batch = [t for t in arguments if t.dtype not in (tf.resource, tf.variant)]
    for op in graph.get_operations() if not batch else ():
        batch += op.outputs if op.type.startswith("IteratorGetNext") else ()
    with tf.init_scope(), tf.device("CPU:0"):
        # Orders these stamps among each other only. A function must not create variables when it
        # is traced again; stamps do not look into this one.
        order = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name="tfscale_stamps")
    if batch:
        with tf.control_dependencies(batch):
            plan = int(ops[0].get_attr("plan"))
            runtime.backend().stamp([order], plan, INPUT_SLOT)
    gathers = {
        handle.name: op
        for op in ops
        if op.type == "TfscalePostGather"
        for handle in op.inputs
        if handle.dtype == tf.resource
    }
    for read in graph.get_operations():
        gather = gathers.get(read.inputs[0].name) if read.type == "ReadVariableOp" else None
        inputs = [] if gather is None else _other_inputs(read.outputs[0])
        if gather is None or not inputs:
            continue
        gathers = {name: op for name, op in gathers.items() if op is not gather}
        plan, slot = (int(gather.get_attr(name)) for name in ("plan", "slot"))
        with tf.control_dependencies(inputs):
            runtime.backend().stamp([order], plan, wait_slot(slot))


def _other_inputs(value: tf.Tensor) -> list[tf.Tensor]:
    """Return what the first op that computes with a variable's value needs besides."""
    users = value.consumers()
    while users and len(users[0].inputs) == 1 and users[0].outputs:  # a cast
        value = users[0].outputs[0]
        users = value.consumers()
    others = users[0].inputs if users else ()
    return [t for t in others if t.name != value.name and t.dtype != tf.resource]


class Offset(NamedTuple):
    """By how much rank 0's clock was ahead of this rank's at a time of the latter; in ns."""

    at_ns: int
    offset_ns: int
    error_ns: int


class ClockMap:
    """Converts times of this rank's clock into times of rank 0's clock.

    Ranks on the same kernel share a clock. For others the offset is measured repeatedly, as clocks
    drift apart by some microseconds per second, and interpolated between two measurements.
    """

    def __init__(self, is_shared: bool | None = None) -> None:
        """Measure for the first time; None compares the ranks' kernels. Collective."""
        if is_shared is None:
            kernels = objects.allgather_object(_kernel(), name="clock")
            is_shared = len(set(kernels)) == 1
        self._is_shared = is_shared
        self._samples: list[Offset] = []
        self.measure()

    def measure(self) -> None:
        """Measure again. Collective."""
        if self._is_shared:
            self._samples = [Offset(clock_ns(), 0, 0)]
        else:
            self._samples.append(measure_offset(_gather, runtime.rank(), clock_ns))

    def to_rank_zero(self, times_ns: Any) -> np.ndarray:
        """Return times of this rank's clock, an integer or an array, as times of rank 0's."""
        times_ns = np.asarray(times_ns, np.int64)
        origin = self._samples[0].at_ns  # nanoseconds since a boot exceed a float's precision
        at = [sample.at_ns - origin for sample in self._samples]
        offsets = np.array([sample.offset_ns for sample in self._samples])
        moved = np.interp(times_ns - origin, at, offsets - offsets[0])
        return times_ns + offsets[0] + np.rint(moved).astype(np.int64)

    @property
    def error_ns(self) -> int:
        """Bound of the error of the offset, for the worst measurement."""
        return max(sample.error_ns for sample in self._samples)


def measure_offset(
    gather: Callable[[Sequence[int]], np.ndarray], rank: int, clock: Callable[[], int]
) -> Offset:
    """Measure the offset to rank 0's clock as NTP does, from the fastest message in each direction.

    A message never arrives before it is sent, so the fastest from rank 0 bounds the offset on one
    side and the fastest to rank 0 on the other. The offset is the middle of both bounds; its error
    is at most half of their distance, which is the least round trip. `gather` returns an array
    [rank, integer].
    """
    fastest: np.ndarray | None = None
    for _ in range(_N_ROUNDS):
        sent = gather([clock()])[:, 0]
        took: np.ndarray = clock() - sent
        fastest = took if fastest is None else np.minimum(fastest, took)
    assert fastest is not None
    matrix = gather([int(took) for took in fastest])  # [receiver, sender]
    there, back = int(matrix[rank, 0]), int(matrix[0, rank])
    if rank == 0:
        return Offset(clock(), 0, 0)
    return Offset(clock(), (back - there) // 2, (back + there + 1) // 2)


def clock_ns() -> int:
    """Return the time of the clock that collectives are measured with."""
    return runtime.backend().clock_ns()


def _gather(values: Sequence[int]) -> np.ndarray:
    call = Call(runtime.world(), "clock")
    row = tf.constant([list(values)], tf.int64)
    return runtime.backend().allgather(row, call)[0].numpy()


def _kernel() -> str:
    """Return a name that is equal for processes which share a monotonic clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
