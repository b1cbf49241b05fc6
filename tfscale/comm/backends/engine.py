"""Where the program is, shown when others wait for this rank."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import process
from tfscale.comm.backends.base import (
    Call,
    MarkKind,
    ReduceOp,
    Scaling,
    gather_and_assign,
    raw_variable,
)
from tfscale.comm.backends.library import EngineOptions, Event, load
from tfscale.comm.backends.slots import Slots, rows_of
from tfscale.comm.software import versions
from tfscale.config import Settings
from tfscale.plan.segments import SegmentedBucket

_STDERR = 2
# Of the real-time signals, which Python and launchers leave alone, none that glibc uses itself.
_SIGNAL = signal.SIGRTMAX - 6


def show_on_signal() -> int:
    """Let a signal write the Python stacks of all threads to stderr; return its number.

    The handler is C code that needs no lock of the interpreter, so it also works while the main
    thread is in a call that never returns.
    """
    faulthandler.register(_SIGNAL, file=_STDERR, all_threads=True)
    return int(_SIGNAL)


_WORLD = -1  # instead of the Fortran handle of a communicator
_MAX_MESSAGE_BYTES = 1 << 30  # MPI counts in 32 bits
_EVENTS_KEPT = 65536  # by the engine, see custom_ops/comm/engine.cc


class EngineBackend:
    """Starts the engine on construction; see custom_ops/comm/engine.h."""

    name = "engine"
    has_marks = True
    records_events = True

    def __init__(self, settings: Settings, fortran_comm: int = _WORLD) -> None:
        """Start the engine. Collective: every rank of the communicator, on the main thread.

        Args:
            settings: Options.
            fortran_comm: Fortran handle of the communicator to work in; -1 for all processes.

        Raises:
            ExchangeError: The library does not fit, MPI cannot be used, or ranks run different
                versions; then on every rank.
        """
        self._library = load()
        self._slots = Slots(self._library)
        self._events = (Event * _EVENTS_KEPT)()
        place = self._library.find_host_place(fortran_comm)
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.cross_rank, self.cross_size = place.cross_rank, place.cross_size
        self.n_cores: int = place.cores
        lengths = f"chunks of {settings.chunk_bytes}"
        options = EngineOptions(
            stall_warning_s=settings.stall_warning_s,
            stall_shutdown_s=settings.stall_shutdown_s,
            max_message_bytes=_MAX_MESSAGE_BYTES,
            chunk_bytes=settings.chunk_bytes,
            window_bytes=settings.window_bytes,
            reduce_threads=settings.reduce_threads or min(4, self.n_cores),
            pin_core=settings.pin_core,
            stack_signal=show_on_signal(),
            identity=f"{versions()}, {lengths}".encode(),
            status_path=process.file_path().encode(),
        )
        self._library.call("start", fortran_comm, options)
        self.rank: int = self._library.call("rank")
        self.size: int = self._library.call("size")

    def _attributes(
        self, call: Call, kind: str, tensors: list[tf.Tensor], rows: tf.Tensor | None = None
    ) -> dict[str, Any]:
        """Place a collective; see custom_ops/tf/glue.h for the attributes of all ops."""
        position = self._slots.place(
            call, kind if rows is None else f"{kind} {rows_of(rows)}", tensors
        )
        shapes = [t.shape for t in tensors] if rows is None else [rows.shape[1:]]
        is_known = all(shape.is_fully_defined() for shape in shapes)
        return {
            "compares": "nothing" if is_known else "shapes" if rows is None else "rows",
            "after": list(call.after),
            "plan": position.plan,
            "slot": position.slot,
            "group": call.group.id,
            "group_size": call.group.size,
            "label": call.label,
        }

    def allreduce(
        self, tensors: Sequence[tf.Tensor], call: Call, op: ReduceOp, scaling: Scaling
    ) -> list[tf.Tensor]:
        """Reduce each tensor over the group; together they are one message."""
        inputs = list(tensors)
        return self._library.ops.tfscale_allreduce(
            tensors=inputs,
            reduce_op=int(op),
            prescale=repr(float(scaling.prescale)),
            postscale=repr(float(scaling.postscale)),
            **self._attributes(call, scaling.terms(f"allreduce {op.name}"), inputs),
        )

    def allgather(self, tensor: tf.Tensor, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
        """Put the members' tensors one after another; also return rows per member (int64)."""
        attributes = self._attributes(call, "allgather", [], tensor)
        gathered, rows = self._library.ops.tfscale_allgather(tensor=tensor, **attributes)
        return gathered, rows

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, call: Call
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Send splits[r] rows to member r; also return rows received per member (int64)."""
        attributes = self._attributes(call, "alltoall", [], tensor)
        received, rows = self._library.ops.tfscale_alltoall(
            tensor=tensor, splits=splits, **attributes
        )
        return received, rows

    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        """Return the tensor of the member number `root`."""
        attributes = self._attributes(call, f"broadcast from {root}", [tensor])
        return self._library.ops.tfscale_broadcast(tensor=tensor, root=root, **attributes)

    def reducescatter(
        self, tensor: tf.Tensor, call: Call, op: ReduceOp, scaling: Scaling
    ) -> tf.Tensor:
        """Reduce and keep this member's part of the rows."""
        return self._library.ops.tfscale_reducescatter(
            tensor=tensor,
            reduce_op=int(op),
            prescale=repr(float(scaling.prescale)),
            postscale=repr(float(scaling.postscale)),
            group_rank=call.group.rank,
            **self._attributes(call, scaling.terms(f"reducescatter {op.name}"), [tensor]),
        )

    def scatter_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        counts: Sequence[int],
        call: Call,
        op: ReduceOp,
        scaling: Scaling,
    ) -> tf.Tensor:
        """Reduce the elements of all tensors, one after another; keep the next counts[r] as r."""
        inputs = list(tensors)
        return self._library.ops.tfscale_scatter_reduce(
            tensors=inputs,
            counts=list(counts),
            reduce_op=int(op),
            prescale=repr(float(scaling.prescale)),
            postscale=repr(float(scaling.postscale)),
            group_rank=call.group.rank,
            **self._attributes(
                call, scaling.terms(f"scatter_reduce {op.name} {list(counts)}"), inputs
            ),
        )

    def post_gather(
        self,
        pieces: Sequence[tf.Tensor],
        variables: Sequence[Any],
        layout: SegmentedBucket,
        call: Call,
    ) -> None:
        """Begin to give variables the values that the members' pieces make up; do not wait."""
        raw = [raw_variable(v) for v in variables]
        if any("GPU" in v.device.upper() for v in raw):
            gather_and_assign(self, pieces, raw, layout, call)
            return
        after = tuple(v.handle for v in raw)
        call = dataclasses.replace(call, after=after, stream=call.stream or "parameters")
        kind = f"gather {layout.dtype} {layout.offsets} {layout.cuts}"
        self._library.ops.tfscale_post_gather(
            pieces=list(pieces),
            dtype=layout.dtype,
            piece_offsets=[piece.offset for piece in layout.pieces(call.group.rank)],
            cuts=list(layout.cuts),
            variable_offsets=list(layout.offsets),
            shapes=list(layout.shapes),
            group_rank=call.group.rank,
            **self._attributes(call, kind, []),
        )

    def await_variables(self, handles: Sequence[tf.Tensor], is_write: bool = False) -> None:
        """Wait until no gather of the variables is under way; any thread, any time."""
        self._library.ops.tfscale_await(variables=list(handles), is_write=is_write)

    def num_pending(self) -> int:
        """Return of how many variables a gather is under way."""
        return self._library.call("num_pending")

    def drain(self) -> None:
        """Wait until no gather is under way on this process; a failure is left to readers."""
        self._library.call("drain")

    def add_group(self, ranks: Sequence[int]) -> int:
        """Make a group known; called by all ranks. Returns its id."""
        return self._library.call("add_group", (ctypes.c_int * len(ranks))(*ranks), len(ranks))

    def mark(self, kind: MarkKind) -> None:
        """Tell the others that this rank takes part in no further step for now."""
        self._library.call("mark", int(kind))

    def num_given_up(self) -> int:
        """Return how many collectives ended because another rank stopped."""
        return self._library.call("num_given_up")

    def start_incarnation(self, number: int) -> None:
        """Separate what comes from what is left of a step that was given up."""
        self._library.call("start_incarnation", number)

    def take_events(self) -> list[Event]:
        """Return the collectives finished since the last call, oldest first."""
        events = self.event_array()
        return [Event.from_buffer_copy(event) for event in events[events["slot"] >= 0]]

    def event_array(self) -> np.ndarray:
        """Return what `take_events` does, and stamps, with the fields of an `Event`."""
        taken = self._library.call("take_events", self._events, len(self._events))
        return np.frombuffer(self._events, np.dtype(Event), taken).copy()

    def stamp(self, handles: Sequence[tf.Tensor], plan: int, slot: int) -> None:
        """Record, each time the function runs, when it has updated some variables.

        Args:
            handles: Resource handles of the variables.
            plan: A plan of the function.
            slot: Negative.
        """
        self._library.ops.tfscale_stamp(after=list(handles), plan=plan, slot=slot)

    def slot_name(self, plan: int, slot: int) -> str:
        """Return the label of the collective that an event is about."""
        return self._slots.name(plan, slot)

    def graph_of(self, plan: int) -> tf.Graph | None:
        """Return the function graph a plan belongs to, if it is still in use."""
        return self._slots.graph_of(plan)

    @property
    def thread_level(self) -> int:
        """MPI's thread level: 2 is SERIALIZED, 3 is MULTIPLE."""
        return self._library.call("thread_level")

    def clock_ns(self) -> int:
        """Return the time, in nanoseconds, of the clock that events are measured with."""
        return self._library.call("clock_ns")

    def abort(self, code: int) -> None:
        """End all processes of the job. Does not return."""
        self._library.call("abort", code)

    def fail(self, why: str) -> None:
        """Tell the other ranks that this one takes part in no further collective."""
        self._library.call("fail", why.encode())

    def close(self) -> bool:
        """Leave the job; waits for all ranks unless communication has failed.

        Returns:
            Whether all ranks left together.

        Raises:
            ExchangeError: A rank does not come, and gives no sign of life.
        """
        return self._library.call("stop") == 0
