"""Horovod as a backend: Gloo where there is no MPI, NCCL between GPUs."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale import config
from tfscale.backends.base import Call, MarkKind, ReduceOp, Scaling
from tfscale.backends.horovod_ops import NamedOps
from tfscale.backends.horovod_values import (
    checked_splits,
    from_wire,
    nan_flag,
    restore_nan,
    scale,
    to_wire,
    widen,
)
from tfscale.backends.variables import WaitingBackend
from tfscale.config import Settings
from tfscale.errors import ConfigError, ExchangeError

logger = logging.getLogger("tfscale")

# Horovod's numbers: 0 is its average, 2 Adasum.
_REDUCE_OPS = {ReduceOp.SUM: 1, ReduceOp.MIN: 3, ReduceOp.MAX: 4, ReduceOp.PRODUCT: 5}


def is_installed() -> bool:
    """Return whether Horovod's package is there; it may still not load."""
    return importlib.util.find_spec("horovod") is not None


def load_horovod() -> Any:
    """Return the module with Horovod's ops.

    Raises:
        ExchangeError: It is not installed, or was built against another TensorFlow.
    """
    try:
        return importlib.import_module("horovod.tensorflow.mpi_ops")
    except Exception as error:
        raise ExchangeError(
            "The Horovod backend needs Horovod built for the TensorFlow that is installed. "
            f"Received: {type(error).__name__}: {error}. Run `python tools/build_horovod.py` in "
            "tfscale's sources, or use backend='engine' under an MPI launcher."
        ) from error


class HorovodBackend(WaitingBackend):
    """Collectives through Horovod's ops and process sets.

    Differences from the engine: the order in which ranks are added is not fixed, so sums may differ
    in their last bits, also from run to run; 16-bit floats are added, and travel, as float32; ranks
    ask each other before each step of `fit` (no marks).
    """

    name = "horovod"
    has_marks = False

    def __init__(self, settings: Settings, comm: Any = None) -> None:
        """Join Horovod's job. Collective.

        Args:
            settings: Time limits of a waiting collective.
            comm: None, an mpi4py communicator or a list of ranks, as Horovod takes it.

        Raises:
            ConfigError: There is no MPI, which `comm` needs.
            ExchangeError: Horovod is missing or cannot start.
        """
        # In whole seconds; Horovod never gives up if it is to give up before it warns.
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
                f"Horovod must start on all ranks. Received: {error}. Start them with horovodrun "
                "or an MPI launcher, and see what Horovod printed."
            ) from error
        if comm is not None and not self._hvd.mpi_enabled():
            self._hvd.shutdown()
            raise ConfigError(
                "comm chooses among the processes of MPI. Received: comm, under Gloo. Start with "
                "`tfscale run` or mpirun, or use process sets."
            )
        hvd = self._hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.cross_rank, self.cross_size = hvd.cross_rank(), hvd.cross_size()
        if self.rank == 0:
            logger.info(
                "Horovod moves the bytes: ranks ask each other before each step, and what the "
                "engine may post past the end of a step is waited for in the step."
            )
        # Horovod refuses a set it knows already; two of our groups may then share one.
        self._sets: dict[tuple[int, ...], int] = {tuple(range(self.size)): 0}
        self._groups: list[int] = [0]

    def allreduce(
        self, tensors: Sequence[tf.Tensor], call: Call, op: ReduceOp, scaling: Scaling
    ) -> list[tf.Tensor]:
        """Reduce each tensor over the group; together they are one message."""
        wide = [scale(widen(t), scaling.prescale) for t in tensors]
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            wide += [nan_flag(t, op) for t in wide]
        options = {**self._options(call, is_scaled=True), "reduce_op": _REDUCE_OPS[op]}

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            if len(inputs) == 1:
                return [self._ops.horovod_allreduce(tensor=inputs[0], name=name, **options)]
            return self._ops.horovod_grouped_allreduce(tensors=inputs, name=name, **options)

        reduced = self._named.run(call, wide, start)
        if len(wide) > len(tensors):
            values, flags = reduced[: len(tensors)], reduced[len(tensors) :]
            reduced = [restore_nan(v, f) for v, f in zip(values, flags, strict=True)]
        pairs = zip(reduced, tensors, strict=True)
        return [tf.cast(scale(r, scaling.postscale), t.dtype) for r, t in pairs]

    def allgather(self, tensor: tf.Tensor, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
        """Put the members' tensors one after another; also return rows per member (int64)."""
        options = self._options(call)

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            return [self._ops.horovod_allgather(tensor=inputs[0], name=name, **options)]

        gathered = self._named.run(call, [to_wire(tensor)], start)[0]
        rows = self._named.run(call, [tf.shape(tensor, tf.int64)[:1]], start)[0]
        rows = tf.ensure_shape(rows, [call.group.size])
        return from_wire(gathered, tensor, [None]), rows

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, call: Call
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Send splits[r] rows to member r; also return rows received per member (int64)."""
        options = self._options(call)

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            return self._ops.horovod_alltoall(
                tensor=inputs[0], splits=inputs[1], name=name, **options
            )

        inputs = [to_wire(tensor), checked_splits(splits, tensor)]
        received, rows = self._named.run(call, inputs, start)
        return from_wire(received, tensor, [None]), tf.cast(rows, tf.int64)

    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        """Return the tensor of the member number `root`."""
        options = {**self._options(call), "root_rank": call.group.ranks[root]}

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            return [self._ops.horovod_broadcast(tensor=inputs[0], name=name, **options)]

        sent = self._named.run(call, [to_wire(tensor)], start)[0]
        return from_wire(sent, tensor, tensor.shape[:1])

    def reducescatter(
        self, tensor: tf.Tensor, call: Call, op: ReduceOp, scaling: Scaling
    ) -> tf.Tensor:
        """Reduce and keep this member's part of the rows.

        Horovod scatters sums only; of an extreme or a product each member keeps its rows.
        """
        if op is not ReduceOp.SUM:
            reduced = self.allreduce([tensor], call, op, scaling)[0]
            rows, size, own = tf.shape(tensor)[0], call.group.size, call.group.rank
            begin = own * (rows // size) + tf.minimum(own, rows % size)
            return reduced[begin : begin + rows // size + tf.cast(own < rows % size, tf.int32)]
        options = {**self._options(call, is_scaled=True), "reduce_op": _REDUCE_OPS[op]}

        def start(inputs: list[tf.Tensor], name: str | None) -> Sequence[tf.Tensor]:
            return [self._ops.horovod_reducescatter(tensor=inputs[0], name=name, **options)]

        own_rows = self._named.run(call, [scale(widen(tensor), scaling.prescale)], start)[0]
        return tf.cast(scale(own_rows, scaling.postscale), tensor.dtype)

    def add_group(self, ranks: Sequence[int]) -> int:
        """Make a group known; called by all ranks. Returns its id."""
        key = tuple(sorted(ranks))
        if key not in self._sets:
            added = self._hvd.add_process_set(list(key))
            self._sets[key] = added.process_set_id
        self._groups.append(self._sets[key])
        return len(self._groups) - 1

    def mark(self, kind: MarkKind) -> None:
        """End communication where this rank leaves; other marks are not known to Horovod."""
        if kind is MarkKind.LEFT:
            self._hvd.shutdown()

    def num_given_up(self) -> int:
        """Nothing is given up: ranks ask before each step."""
        return 0

    def start_incarnation(self, number: int) -> None:
        """Nothing is left on the wire."""

    @property
    def thread_level(self) -> int:
        """MPI's thread level: 3 (MULTIPLE) where Horovod says that others may call MPI."""
        return 3 if self._hvd.mpi_enabled() and self._hvd.mpi_threads_supported() else 0

    def is_enabled(self, controller: str) -> bool:
        """Return whether ranks agree over "mpi" or "gloo"."""
        return bool(getattr(self._hvd, f"{controller}_enabled")())

    def abort(self, code: int) -> None:
        """End this process; the launcher then ends the others. Does not return."""
        if self._hvd.is_initialized() and self._hvd.mpi_enabled():
            try:
                from mpi4py import MPI

                MPI.COMM_WORLD.Abort(code)
            except ImportError:
                pass  # The launcher notices the exit code.
        os._exit(code)

    def close(self) -> bool:
        """Leave the job; nobody is waited for."""
        self._hvd.shutdown()
        return True

    def _options(self, call: Call, is_scaled: bool = False) -> dict[str, Any]:
        # Its factors are float32 attributes, too coarse for float64: we scale ourselves.
        factors = {"prescale_factor": 1.0, "postscale_factor": 1.0} if is_scaled else {}
        return {
            **factors,
            "ignore_name_scope": True,
            "process_set_id": self._groups[call.group.id],
        }
