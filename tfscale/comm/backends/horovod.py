"""Horovod as a backend: names and guards for its ops, and number types that it lacks."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale import config
from tfscale.comm.backends.base import Backend, Call, MarkKind, ReduceOp, Reduction, Rows, Tensors
from tfscale.comm.backends.slots import COUNT, EAGER, Slots
from tfscale.config import ConfigError, ExchangeError, Settings
from tfscale.internals.trace import set_attribute

# Dtypes that Horovod's data ops accept; others are sent as bytes.
_MOVABLE = (
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.float32, tf.float64, tf.bool),
)


def widen(tensor: tf.Tensor) -> tf.Tensor:
    """Return 16-bit floats as float32: Horovod has no bfloat16 and rounds each partial sum."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size == 2 else tensor


def scale(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Return factor * tensor, truncated for integers.

    A factor of 1 / n divides by n, as Horovod does: the results differ in the last bit.
    """
    divisor = round(1.0 / factor) if factor else 0
    if factor == 1.0:
        return tensor
    if divisor and abs(divisor * factor - 1.0) < 1e-12:
        divide = tf.divide if tensor.dtype.is_floating else tf.truncatediv
        return divide(tensor, tf.constant(divisor, tensor.dtype))
    if tensor.dtype.is_floating:
        return tensor * tf.constant(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def nan_flag(tensor: tf.Tensor, op: ReduceOp) -> tf.Tensor:
    """Return a flag per element that survives the minimum or maximum if a rank has NaN there.

    The libraries that Horovod uses disagree on the minimum and maximum of NaN and a number.
    """
    if not tensor.dtype.is_floating:
        return tf.zeros([1], tensor.dtype)
    is_nan = tf.cast(tf.math.is_nan(tensor), tensor.dtype)
    return is_nan if op is ReduceOp.MAX else -is_nan


def restore_nan(value: tf.Tensor, flag: tf.Tensor) -> tf.Tensor:
    """Put NaN where a rank had it, see `nan_flag`."""
    if not value.dtype.is_floating:
        return value
    return tf.where(flag != 0, tf.constant(float("nan"), value.dtype), value)


def to_wire(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor as Horovod can move it: of a type it knows, or as bytes."""
    return tensor if tensor.dtype in _MOVABLE else tf.bitcast(tensor, tf.uint8)


def from_wire(moved: tf.Tensor, like: tf.Tensor, rows: Any) -> tf.Tensor:
    """Return a received tensor in the dtype and, except for the rows, the shape of `like`."""
    value = moved if like.dtype in _MOVABLE else tf.bitcast(moved, like.dtype)
    return tf.ensure_shape(value, tf.TensorShape(rows).concatenate(like.shape[1:]))


def checked_splits(splits: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Return splits as int32, checked: Horovod would drop rows that belong to no split."""
    counts = tf.cast(splits, tf.int32)
    text = "splits must be 0 or more and add up to the tensor's rows. Received: splits, rows"
    rows = tf.shape(tensor)[0]
    is_right = tf.reduce_all(counts >= 0) & (tf.reduce_sum(counts) == rows)
    with tf.control_dependencies([tf.debugging.Assert(is_right, [text, counts, rows])]):
        return tf.identity(counts)


# Starts an op on guarded inputs under a name; returns its outputs.
Start = Callable[[list[tf.Tensor], str | None], Sequence[tf.Tensor]]


class NamedOps:
    """Runs Horovod's ops, which find their counterparts on other ranks by name.

    Horovod's ops are stateless, and TensorFlow may compute a stateless op before the first step
    when its input is constant, merge two of them, or drop one whose result only some ranks use;
    the other ranks would then wait forever. So each input passes an op whose result is known only
    when it runs, each op has an attribute of its own, and a stateful op after it keeps it alive.
    Names number the traced functions of a group and the collectives in them, in the order of
    tracing, which is equal on all ranks.
    """

    def __init__(self) -> None:
        self._slots = Slots(self._number)
        self._groups: list[int] = []  # of each plan
        self._titles: list[str] = []
        self._n_slots: list[int] = []

    def _number(self, name: str, *arguments: Any) -> int:
        """Count plans and slots, as the engine's library does."""
        if name == "plan_create":
            group = arguments[0]
            self._titles.append(f"g{group}.p{self._groups.count(group)}")
            self._groups.append(group)
            self._n_slots.append(0)
            return len(self._titles) - 1
        plan = arguments[0]
        self._n_slots[plan] += 1
        return self._n_slots[plan] - 1

    def run(
        self, call: Call, inputs: Sequence[tf.Tensor], start: Start, terms: str = ""
    ) -> list[tf.Tensor]:
        """Run an op eagerly, or place it in the function that is being traced; return its outputs.

        A call without `after` waits for those traced before it. `inputs` include integers that
        describe the amount sent (splits). `terms` is, like `call.terms`, text that must be equal on
        all ranks. It becomes part of the name: Horovod reports the ranks without an op of this
        name, and gives up after its time limit.
        """
        position = self._slots.place(call, "", [])
        if position.plan == EAGER:
            return list(start(list(inputs), None))
        label = COUNT.sub("", call.label)
        slot = ("tfscale", self._titles[position.plan], f"s{position.slot}")
        parts = (*slot, label, *filter(None, (terms, call.terms)))
        name = re.sub(r"[^A-Za-z0-9_.-]", ".", ".".join(parts))
        with tf.control_dependencies([] if call.after else [_marker()]):
            outputs = list(start([_unknown_until_run(t) for t in inputs], name))
        set_attribute(outputs[0].op, "_tfscale_slot", name)
        _keep(outputs[0])
        return outputs


def _unknown_until_run(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor, without a copy, as one that TensorFlow cannot fold into a constant.

    TensorFlow computes ops on constants before a function runs. A rank that owns no part of a
    bucket would start the gather of its empty constant there and wait for ranks whose gather is
    part of a step, which this rank then never begins. Control edges, PlaceholderWithDefault and
    dynamic shapes do not prevent this; a slice whose begin comes from a stateful op does. A random
    op is stateful, but not chained in the order of tracing, so overlap remains.
    """
    with tf.device("CPU:0"):
        no_dimensions = tf.zeros([0], tf.int32)
        zero = tf.raw_ops.RandomUniformInt(shape=no_dimensions, minval=0, maxval=1, seed=1, seed2=1)
    if tensor.shape.rank == 0:
        return tf.stack([tensor])[zero]
    unknown = tensor[zero:]
    unknown.set_shape(tensor.shape)
    return unknown


def _marker() -> tf.Operation:
    """Make a small stateful op: TensorFlow keeps stateful ops, in the order of tracing."""
    with tf.device("CPU:0"):
        return tf.timestamp().op


def _keep(tensor: tf.Tensor) -> None:
    """Let a stateful op read one number of a tensor: with a control edge alone it is dropped."""
    first = tf.reshape(tensor, [-1])[:1]
    with tf.device("CPU:0"):
        tf.raw_ops.Assert(condition=tf.timestamp() > 0, data=[first], summarize=1)


logger = logging.getLogger("tfscale")

# Horovod's numbers: 0 is its average, 2 Adasum.
_REDUCE_OPS = {ReduceOp.SUM: 1, ReduceOp.MIN: 3, ReduceOp.MAX: 4, ReduceOp.PRODUCT: 5}
# Horovod's factors are float32 attributes, too coarse for float64: tensors are scaled here.
_UNSCALED = {"prescale_factor": 1.0, "postscale_factor": 1.0}


def is_installed() -> bool:
    """Return whether Horovod's package is there; it may still not load."""
    return importlib.util.find_spec("horovod") is not None


def load_horovod() -> Any:
    """Return the module with Horovod's ops; raises ExchangeError unless it loads."""
    try:
        return importlib.import_module("horovod.tensorflow.mpi_ops")
    except Exception as error:
        raise ExchangeError(
            "backend='horovod' needs Horovod built for the installed TensorFlow. Received: "
            f"{type(error).__name__}: {error}. Run `python tools/build_horovod.py` in tfscale's "
            "sources, or use backend='engine' under an MPI launcher."
        ) from error


class HorovodBackend(Backend):
    """Collectives through Horovod's ops and process sets.

    Differences from the engine: the order in which ranks are added is not fixed, so sums may differ
    in their last bits, also from run to run; 16-bit floats are added, and sent, as float32; ranks
    ask each other before each step of `fit` (no marks).
    """

    name = "horovod"
    has_marks = False

    def __init__(self, settings: Settings, comm: Any = None) -> None:
        """Join Horovod's job, of all processes or of `comm`'s. Collective."""
        # In whole seconds. Horovod never gives up if this limit is not above that of the warning.
        is_limited = math.isfinite(settings.stall_shutdown_s)
        give_up_s = max(2, round(settings.stall_shutdown_s)) if is_limited else sys.maxsize >> 32
        warn_s = max(1, min(round(settings.stall_warning_s), give_up_s - 1))
        config.set_default_environment(
            HOROVOD_STALL_CHECK_TIME_SECONDS=str(warn_s),
            HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=str(give_up_s),
        )
        self._hvd = load_horovod()
        self._ops = self._hvd.MPI_LIB
        self._named = NamedOps()
        try:
            self._hvd.init(comm=comm, process_sets="dynamic")
        except (ValueError, RuntimeError) as error:
            raise ExchangeError(
                f"Could not start Horovod. Received: {error}. Start ranks with horovodrun or an "
                "MPI launcher, and see what Horovod printed."
            ) from error
        hvd = self._hvd
        is_used = {"mpi": hvd.mpi_enabled(), "gloo": hvd.gloo_enabled()}
        self.libraries = tuple(name for name in is_used if is_used[name])
        if comm is not None and "mpi" not in self.libraries:
            hvd.shutdown()
            raise ConfigError(
                "comm needs MPI. Received: comm, under Gloo. Start with `tfscale run` or "
                "mpirun, or use process sets."
            )
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.cross_rank, self.cross_size = hvd.cross_rank(), hvd.cross_size()
        # 3 is MULTIPLE, where Horovod allows other threads to call MPI.
        self.thread_level = 3 if "mpi" in self.libraries and hvd.mpi_threads_supported() else 0
        if self.rank == 0:
            logger.info(
                "Horovod moves the bytes: ranks ask each other before each step, and what the "
                "engine may post past the end of a step is waited for in the step."
            )
        # Horovod refuses a set that it knows already, so two groups may share one.
        self._sets: dict[tuple[int, ...], int] = {tuple(range(self.size)): 0}
        self._groups: list[int] = [0]

    def allreduce(self, tensors: Tensors, call: Call, reduction: Reduction) -> list[tf.Tensor]:
        op = reduction.op
        wide = [scale(widen(t), reduction.prescale) for t in tensors]
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            wide += [nan_flag(t, op) for t in wide]
        options = {**self._options(call), **_UNSCALED, "reduce_op": _REDUCE_OPS[op]}

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            if len(inputs) == 1:
                return [self._ops.horovod_allreduce(tensor=inputs[0], name=name, **options)]
            return self._ops.horovod_grouped_allreduce(tensors=inputs, name=name, **options)

        reduced = self._named.run(call, wide, start, reduction.terms())
        if len(wide) > len(tensors):
            values, flags = reduced[: len(tensors)], reduced[len(tensors) :]
            reduced = [restore_nan(v, f) for v, f in zip(values, flags, strict=True)]
        pairs = zip(reduced, tensors, strict=True)
        return [tf.cast(scale(r, reduction.postscale), t.dtype) for r, t in pairs]

    def allgather(self, tensor: tf.Tensor, call: Call) -> Rows:
        op = self._ops.horovod_allgather
        gathered = self._run(op, to_wire(tensor), call)
        rows = self._run(op, tf.shape(tensor, tf.int64)[:1], call)
        rows = tf.ensure_shape(rows, [call.group.size])
        return from_wire(gathered, tensor, [None]), rows

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, call: Call) -> Rows:
        options = self._options(call)

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            return self._ops.horovod_alltoall(
                tensor=inputs[0], splits=inputs[1], name=name, **options
            )

        inputs = [to_wire(tensor), checked_splits(splits, tensor)]
        received, rows = self._named.run(call, inputs, start)
        return from_wire(received, tensor, [None]), tf.cast(rows, tf.int64)

    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        root_rank = call.group.ranks[root]
        sent = self._run(self._ops.horovod_broadcast, to_wire(tensor), call, root_rank=root_rank)
        return from_wire(sent, tensor, tensor.shape[:1])

    def reducescatter(self, tensor: tf.Tensor, call: Call, reduction: Reduction) -> tf.Tensor:
        # Horovod scatters sums only; others are allreduced, and each member keeps its rows.
        if reduction.op is not ReduceOp.SUM:
            reduced = self.allreduce([tensor], call, reduction)[0]
            rows, size, set_rank = tf.shape(tensor)[0], call.group.size, call.group.rank
            begin = set_rank * (rows // size) + tf.minimum(set_rank, rows % size)
            return reduced[begin : begin + rows // size + tf.cast(set_rank < rows % size, tf.int32)]
        scaled, terms = scale(widen(tensor), reduction.prescale), reduction.terms()
        options = {**_UNSCALED, "reduce_op": _REDUCE_OPS[reduction.op]}
        own_rows = self._run(self._ops.horovod_reducescatter, scaled, call, terms, **options)
        return tf.cast(scale(own_rows, reduction.postscale), tensor.dtype)

    def add_group(self, ranks: Sequence[int]) -> int:
        key = tuple(sorted(ranks))
        if key not in self._sets:
            added = self._hvd.add_process_set(list(key))
            self._sets[key] = added.process_set_id
        self._groups.append(self._sets[key])
        return len(self._groups) - 1

    def remove_group(self, group: int) -> None:
        """Keep Horovod's set: the next group of the same ranks uses it."""

    def mark(self, kind: MarkKind) -> None:
        """End communication where this rank leaves; other marks are not known to Horovod."""
        if kind is MarkKind.LEFT:
            self._hvd.shutdown()

    def abort(self, code: int) -> None:
        """End this process; the launcher then ends the others. Does not return."""
        if self._hvd.is_initialized() and "mpi" in self.libraries:
            try:
                from mpi4py import MPI

                MPI.COMM_WORLD.Abort(code)
            except ImportError:
                pass  # The launcher notices the exit code.
        os._exit(code)

    def close(self) -> bool:
        """Leave the job without waiting for others."""
        self._hvd.shutdown()
        return True

    def _options(self, call: Call) -> dict[str, Any]:
        return {"ignore_name_scope": True, "process_set_id": self._groups[call.group.id]}

    def _run(
        self, op: Callable, tensor: tf.Tensor, call: Call, terms: str = "", **options: Any
    ) -> tf.Tensor:
        """Run an op of one tensor."""
        options = {**self._options(call), **options}

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            return [op(tensor=inputs[0], name=name, **options)]

        return self._named.run(call, [tensor], start, terms)[0]
