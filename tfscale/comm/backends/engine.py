"""The engine as a backend: the C++ library and its C interface (custom_ops/comm/c_api.h)."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import process
from tfscale.comm.backends.base import (
    Backend,
    Call,
    Changes,
    MarkKind,
    Quantization,
    Quantized,
    Reduction,
    Rows,
    Sparsity,
    Tensors,
    Traffic,
)
from tfscale.comm.backends.slots import Slots
from tfscale.comm.software import versions
from tfscale.config import ExchangeError, Settings, environment, require
from tfscale.internals.keras import by_device, raw_variable
from tfscale.native import mpi_library
from tfscale.native.cache import Libraries, built_for, digests, prepare_libraries
from tfscale.native.cores import find_quota, share_of_cores
from tfscale.plan.segments import SegmentedBucket

logger = logging.getLogger("tfscale")

_WORLD = -1  # instead of the Fortran handle of a communicator
_MAX_MESSAGE_BYTES = 1 << 30  # MPI counts in 32 bits
_REPORT_S = 1.0  # of waiting to rank 0, where metrics are served
_EVENTS_KEPT = 65536  # by the engine, see custom_ops/comm/engine.cc
_STDERR = 2
# A real-time signal, which Python and launchers do not use, and not one of those glibc uses.
_STACK_SIGNAL = signal.SIGRTMAX - 6


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class EngineOptions(ctypes.Structure):
    """Mirror of `EngineOptions` in custom_ops/comm/options.h."""

    _fields_ = (
        *_fields(ctypes.c_double, "stall_warning_s", "stall_shutdown_s", "report_s"),
        *_fields(ctypes.c_int64, "max_message_bytes", "chunk_bytes", "window_bytes"),
        *_fields(ctypes.c_int64, "host_memory_bytes"),
        *_fields(ctypes.c_int32, "reduce_threads", "pin_core", "ranks_per_host", "stack_signal"),
        *_fields(ctypes.c_char_p, "identity", "status_path"),
    )


class HostPlace(ctypes.Structure):
    """Mirror of `HostPlace` in custom_ops/comm/host_place.h."""

    _fields_ = _fields(
        ctypes.c_int32,
        *("local_rank", "local_size", "cross_rank", "cross_size", "cores", "sharers_before"),
    )


class Event(ctypes.Structure):
    """Mirror of `Event` in custom_ops/comm/task.h: times in nanoseconds."""

    _fields_ = (
        *_fields(ctypes.c_int64, "posted_ns", "started_ns", "ended_ns", "bytes", "execution"),
        *_fields(ctypes.c_int32, "plan", "slot"),
    )


_INT, _TEXT = ctypes.c_int, ctypes.c_char_p
_INT_P = ctypes.POINTER(ctypes.c_int)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "last_error": (_TEXT, ()),
    "start": (_INT, (_INT, ctypes.POINTER(EngineOptions))),
    "stop": (_INT, ()),
    "abort": (None, (_INT,)),
    "rank": (_INT, ()),
    "size": (_INT, ()),
    "thread_level": (_INT, ()),
    "host_place": (_INT, (_INT, ctypes.POINTER(HostPlace))),
    "add_group": (_INT, (_INT_P, _INT)),
    "remove_group": (_INT, (_INT,)),
    "plan_create": (_INT, (_INT, _TEXT, _INT)),
    "plan_add_slot": (_INT, (_INT, _TEXT, _TEXT)),
    "mark": (_INT, (_INT,)),
    "start_incarnation": (_INT, (_INT,)),
    "num_given_up": (ctypes.c_int64, ()),
    "fail": (_INT, (_TEXT,)),
    "num_pending": (ctypes.c_int64, ()),
    "num_failed": (ctypes.c_int64, ()),
    "drain": (None, ()),
    "take_events": (ctypes.c_int64, (ctypes.POINTER(Event), ctypes.c_int64)),
    "traffic": (ctypes.c_int64, (ctypes.POINTER(ctypes.c_double), ctypes.c_int64)),
    "clock_ns": (ctypes.c_int64, ()),
}


class Library:
    """The loaded libraries: `ops` are TensorFlow's wrappers of its ops, `call` the C functions."""

    def __init__(self, libraries: Libraries) -> None:
        """Load the libraries; raises ExchangeError with the loader's text where that fails.

        Each finds the one before it by its soname: the engine MPI, the ops the engine.
        """
        self._functions = {}
        try:
            ctypes.CDLL(libraries.mpi.path)
            functions = ctypes.CDLL(str(libraries.engine))
            self.ops = tf.load_op_library(str(libraries.ops))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(functions, f"tfscale_{name}")
                function.restype, function.argtypes = result, arguments
                self._functions[name] = function
        except (OSError, AttributeError, tf.errors.OpError) as error:  # an older one lacks a name
            raise ExchangeError(
                f"Could not load the library. Received: {error}. Run `tfscale doctor` to see "
                "what is missing, `tfscale build` to build it again."
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a C function by its name without the prefix `tfscale_`; raises its ExchangeError."""
        result = self._functions[name](*arguments)
        if isinstance(result, int) and result < 0:
            raise ExchangeError(self._functions["last_error"]().decode())
        return result


@functools.cache
def load() -> Library:
    """Return the libraries of this installation, loaded once; what is missing is compiled."""
    launch = process.discover(environment())
    kind = launch.launcher if launch else ""
    who = f"rank {launch.rank} (host {socket.gethostname()})" if launch else ""
    mpi = mpi_library.locate(kind, built_for())
    libraries = prepare_libraries(mpi, who)
    try:
        library = Library(libraries)
    except ExchangeError as error:
        # One that was compiled elsewhere may need later system libraries than this host has.
        if isinstance(error.__cause__, AttributeError):
            raise
        logger.info("%s does not load here: %s", libraries.places(), error.__cause__)
        libraries = prepare_libraries(mpi, who, digests(libraries))
        library = Library(libraries)
    logger.info("Loaded %s.", libraries.places())
    return library


def show_on_signal() -> int:
    """Let a signal write the Python stacks of all threads to stderr; return its number.

    The engine sends it to ranks for which others wait. The handler is C code that does not need
    the interpreter's lock, so it works even while the main thread is in a call that never returns.
    """
    faulthandler.register(_STACK_SIGNAL, file=_STDERR, all_threads=True)
    return int(_STACK_SIGNAL)


def pinned_core(rule: str, host_place: HostPlace, usable: Sequence[int]) -> int:
    """Return the core of a rank's communication thread, or -1 for any.

    Args:
        rule: `Settings.pin_core`.
        host_place: Of the rank on its host.
        usable: Cores that the rank may run on, ascending.

    Raises:
        ConfigError: A list has no core for this rank.
    """
    if rule == "none":
        return -1
    if rule == "last":
        end = (
            host_place.sharers_before + 1
        ) * host_place.cores  # of this rank's part of shared cores
        return usable[min(end, len(usable)) - 1]
    first, _, step = rule.partition("+")
    if step:
        return int(first) + host_place.local_rank * int(step)
    cores = rule.split(",")
    remedy = 'Name more of them, or set "last".'
    rule_text = f"a core for each of the {host_place.local_size} ranks of a host"
    require(host_place.local_rank < len(cores), "TFSCALE_PIN_CORE", rule_text, rule, remedy)
    return int(cores[host_place.local_rank])


def _on_gpu(variables: Sequence[Any]) -> bool:
    return any("GPU" in variable.device.upper() for variable in variables)


class EngineBackend(Backend):
    """Starts the engine on construction; see custom_ops/comm/engine.h."""

    name = "engine"
    has_marks = True
    records_events = True
    libraries = ("mpi",)

    def __init__(self, settings: Settings, fortran_comm: int = _WORLD) -> None:
        """Start the engine in a communicator. Collective: all its ranks, on the main thread.

        Raises ExchangeError on every rank if ranks run different versions.
        """
        library = load()
        self._library, self._ops = library, library.ops
        self._slots = Slots(library.call)
        self._events = (Event * _EVENTS_KEPT)()
        host_place = HostPlace()
        library.call("host_place", fortran_comm, host_place)
        self.local_rank, self.local_size = host_place.local_rank, host_place.local_size
        self.cross_rank, self.cross_size = host_place.cross_rank, host_place.cross_size
        self.n_cores = share_of_cores(host_place.cores, host_place.local_size)
        # The last of the ranks that share cores counts them all.
        n_usable = len(os.sched_getaffinity(0))
        self.is_crowded = (
            host_place.sharers_before >= n_usable or host_place.local_size > find_quota()
        )
        options = EngineOptions(
            stall_warning_s=settings.stall_warning_s,
            stall_shutdown_s=settings.stall_shutdown_s,
            report_s=_REPORT_S if settings.metrics else 0.0,
            max_message_bytes=_MAX_MESSAGE_BYTES,
            chunk_bytes=settings.chunk_bytes,
            window_bytes=settings.window_bytes,
            host_memory_bytes=settings.host_memory,
            reduce_threads=settings.reduce_threads or min(4, self.n_cores),
            pin_core=pinned_core(settings.pin_core, host_place, sorted(os.sched_getaffinity(0))),
            ranks_per_host=settings.ranks_per_host,
            stack_signal=show_on_signal(),
            identity=f"{versions()}, chunks of {settings.chunk_bytes}, "
            f"hosts of {settings.ranks_per_host}, host memory {settings.host_memory}".encode(),
            status_path=process.file_path().encode(),
        )
        library.call("start", fortran_comm, options)
        self.rank: int = library.call("rank")
        self.size: int = library.call("size")
        self.thread_level: int = library.call("thread_level")

    def _attributes(
        self, call: Call, kind: str, tensors: list[tf.Tensor], rows: tf.Tensor | None = None
    ) -> dict[str, Any]:
        """Place a collective; see custom_ops/tf/glue.h for the attributes of all ops."""
        if rows is not None:  # their number may differ between ranks
            kind = f"{kind} rows of {rows.dtype.name}{rows.shape[1:]}"
        position = self._slots.place(call, kind, tensors)
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

    def _reduction(
        self, call: Call, kind: str, reduction: Reduction, tensors: Tensors
    ) -> dict[str, Any]:
        """Place a reduction; operation and factors must be equal on all ranks."""
        return {
            "reduce_op": int(reduction.op),
            "prescale": repr(float(reduction.prescale)),
            "postscale": repr(float(reduction.postscale)),
            **self._attributes(call, reduction.terms(kind), list(tensors)),
        }

    def allreduce(self, tensors: Tensors, call: Call, reduction: Reduction) -> list[tf.Tensor]:
        attributes = self._reduction(call, "allreduce", reduction, tensors)
        return self._ops.tfscale_allreduce(tensors=list(tensors), **attributes)

    def allgather(self, tensor: tf.Tensor, call: Call) -> Rows:
        attributes = self._attributes(call, "allgather", [], tensor)
        gathered, rows = self._ops.tfscale_allgather(tensor=tensor, **attributes)
        return gathered, rows

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, call: Call) -> Rows:
        attributes = self._attributes(call, "alltoall", [], tensor)
        received, rows = self._ops.tfscale_alltoall(tensor=tensor, splits=splits, **attributes)
        return received, rows

    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        attributes = self._attributes(call, f"broadcast from {root}", [tensor])
        return self._ops.tfscale_broadcast(tensor=tensor, root=root, **attributes)

    def reducescatter(self, tensor: tf.Tensor, call: Call, reduction: Reduction) -> tf.Tensor:
        return self._ops.tfscale_reducescatter(
            tensor=tensor,
            group_rank=call.group.rank,
            **self._reduction(call, "reducescatter", reduction, [tensor]),
        )

    def scatter_reduce(
        self, tensors: Tensors, counts: Sequence[int], call: Call, reduction: Reduction
    ) -> tf.Tensor:
        return self._ops.tfscale_scatter_reduce(
            tensors=list(tensors),
            counts=list(counts),
            group_rank=call.group.rank,
            **self._reduction(call, f"scatter_reduce {list(counts)}", reduction, tensors),
        )

    def _quantized(
        self, call: Call, kind: str, tensors: Tensors, quantization: Quantization, how: Reduction
    ) -> dict[str, Any]:
        """Place a quantised reduction; the bits are compared by the lengths of its messages."""
        kind = how.terms(f"{kind} in blocks of {quantization.block}")
        return {
            "tensors": list(tensors),
            "errors": list(quantization.errors),
            "bits": quantization.bits,
            "block": quantization.block,
            "cuts": [cut for cuts in quantization.cuts for cut in cuts],
            "prescale": repr(float(how.prescale)),
            "postscale": repr(float(how.postscale)),
            "group_rank": call.group.rank,
            **self._attributes(call, kind, list(tensors)),
        }

    def quantized_allreduce(
        self, tensors: Tensors, quantization: Quantization, call: Call, reduction: Reduction
    ) -> Quantized:
        inputs = self._quantized(call, "quantized allreduce", tensors, quantization, reduction)
        inputs["owner_errors"] = list(quantization.owner_errors)
        return Quantized(*self._ops.tfscale_quantized_allreduce(**inputs))

    def quantized_scatter(
        self, tensors: Tensors, quantization: Quantization, call: Call, reduction: Reduction
    ) -> Quantized:
        kind = f"quantized scatter {quantization.cuts}"
        inputs = self._quantized(call, kind, tensors, quantization, reduction)
        segment, errors = self._ops.tfscale_quantized_scatter(**inputs)
        return Quantized([segment], errors)

    def post_gather(
        self,
        pieces: Tensors,
        variables: Sequence[Any],
        layout: SegmentedBucket,
        call: Call,
        changes: Changes | None = None,
    ) -> None:
        raw = [raw_variable(v) for v in variables]
        if _on_gpu(raw):
            self.gather_and_assign(pieces, raw, layout, call)
            return
        after = tuple(v.handle for v in raw)
        call = dataclasses.replace(call, after=after, stream=call.stream or "parameters")
        how = changes or Changes(32, 256, (False,) * len(raw))
        kind = f"gather {layout.dtype} {layout.offsets} {layout.cuts} {how.block} {how.is_coded}"
        self._ops.tfscale_post_gather(
            pieces=list(pieces),
            bits=how.bits,
            block=how.block,
            is_coded=list(how.is_coded),
            dtype=layout.dtype,
            piece_offsets=[piece.offset for piece in layout.pieces(call.group.rank)],
            cuts=list(layout.cuts),
            variable_offsets=list(layout.offsets),
            shapes=list(layout.shapes),
            group_rank=call.group.rank,
            **self._attributes(call, kind, []),
        )

    def post_allreduce(
        self, tensors: Tensors, variables: Sequence[Any], call: Call, reduction: Reduction
    ) -> None:
        raw = [raw_variable(v) for v in variables]
        if tf.executing_eagerly() or _on_gpu(raw):
            super().post_allreduce(tensors, variables, call, reduction)
            return
        call = dataclasses.replace(
            call, after=tuple(v.handle for v in raw), stream=call.stream or "averages"
        )
        attributes = self._reduction(call, "posted allreduce", reduction, tensors)
        self._ops.tfscale_post_allreduce(tensors=list(tensors), **attributes)

    def post_coded(
        self,
        tensors: Tensors,
        sums: Any,
        residuals: Sequence[Any],
        coding: Quantization | Sparsity,
        call: Call,
        reduction: Reduction,
    ) -> None:
        after = tuple(raw_variable(v).handle for v in (sums, *residuals))
        call = dataclasses.replace(call, after=after, stream=call.stream or "averages")
        inputs: dict[str, Any] = {
            "tensors": list(tensors),
            "cuts": [cut for cuts in coding.cuts for cut in cuts],
            "prescale": repr(float(reduction.prescale)),
            "postscale": repr(float(reduction.postscale)),
        }
        if isinstance(coding, Quantization):
            kind = reduction.terms(f"posted quantized allreduce in blocks of {coding.block}")
            inputs |= {"bits": coding.bits, "block": coding.block}
            post = self._ops.tfscale_post_quantized_allreduce
        else:
            shares = f"{coding.share} of {coding.chunk}, decay {coding.decay}"
            kind = reduction.terms(f"posted sparse allreduce of {shares}")
            inputs |= {"share": repr(float(coding.share)), "decay": repr(float(coding.decay))}
            inputs["chunk"] = coding.chunk
            post = self._ops.tfscale_post_sparse_allreduce
        post(**inputs, **self._attributes(call, kind, list(tensors)))

    def merge(self, variables: Sequence[Any], vectors: Tensors, weight: float) -> Any:
        if _on_gpu(variables):
            return super().merge(variables, vectors, weight)
        handles, factor = [v.handle for v in variables], repr(float(weight))
        return self._ops.tfscale_merge(variables=handles, vectors=list(vectors), weight=factor)

    def await_variables(self, handles: Sequence[tf.Tensor], is_write: bool = False) -> None:
        for own in by_device(handles, lambda handle: handle.device):
            self._ops.tfscale_await(variables=own, is_write=is_write)

    def num_pending(self) -> int:
        return self._library.call("num_pending")

    def num_failed(self) -> int:
        return self._library.call("num_failed")

    def drain(self) -> None:
        self._library.call("drain")

    def add_group(self, ranks: Sequence[int]) -> int:
        return self._library.call("add_group", (ctypes.c_int * len(ranks))(*ranks), len(ranks))

    def remove_group(self, group: int) -> None:
        """Free what a group holds, if no traced function uses it."""
        self._library.call("remove_group", group)

    def mark(self, kind: MarkKind) -> None:
        self._library.call("mark", int(kind))

    def num_given_up(self) -> int:
        return self._library.call("num_given_up")

    def start_incarnation(self, number: int) -> None:
        self._library.call("start_incarnation", number)

    def event_array(self) -> np.ndarray:
        taken = self._library.call("take_events", self._events, len(self._events))
        return np.frombuffer(self._events, np.dtype(Event), taken).copy()

    def traffic(self) -> Traffic:
        waited_s = (ctypes.c_double * self.size)()
        n_bytes = self._library.call("traffic", waited_s, self.size)
        return Traffic(tuple(waited_s), n_bytes)

    def stamp(self, handles: Sequence[tf.Tensor], plan: int, slot: int) -> None:
        self._ops.tfscale_stamp(after=list(handles), plan=plan, slot=slot)

    def slot_name(self, plan: int, slot: int) -> str:
        return self._slots.name(plan, slot)

    def graph_of(self, plan: int) -> tf.Graph | None:
        return self._slots.graph_of(plan)

    def clock_ns(self) -> int:
        return self._library.call("clock_ns")

    def abort(self, code: int) -> None:
        self._library.call("abort", code)

    def fail(self, why: str) -> None:
        self._library.call("fail", why.encode())

    def close(self) -> bool:
        return self._library.call("stop") == 0
