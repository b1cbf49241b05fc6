"""Collectives on tensors, eagerly and in `tf.function`, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Scaling
from tfscale.comm.compression import Compression
from tfscale.comm.eager import agree, header_of, raise_own_errors
from tfscale.comm.runtime import (
    Average,
    ProcessSet,
    Product,
    Sum,
    engine_op,
    global_process_set,
    scaling_of,
)
from tfscale.comm.sparse import allreduce_sparse
from tfscale.config import ConfigError, ExchangeError

# Marked do_not_convert below: AutoGraph would convert our sources in every traced function.
_NO_GRADIENT = "Only sums and averages have a gradient. Received: op={}. Use Sum or Average."


def _members(process_set: ProcessSet, what: str) -> Group:
    group = process_set.group()
    if group.rank < 0:
        raise ExchangeError(
            f"Only members of a process set may call {what}. Received: a call on rank "
            f"{runtime.rank()}, which is not in {list(group.ranks)}. Guard it with "
            "process_set.included()."
        )
    return group


def require_member(root_rank: int, group: Group) -> None:
    """Check that a rank belongs to a group.

    Raises:
        ConfigError: It does not.
    """
    if root_rank not in group.ranks:
        raise ConfigError(
            f"root_rank must be one of {list(group.ranks)}. Received: root_rank={root_rank}."
        )


def _run(kind: str, options: list[Any], tensors: list[Any], call: Call, body: Callable) -> Any:
    if not tf.executing_eagerly():
        return body()
    agree(header_of(kind, options, tensors, call.label), call.group)
    return raise_own_errors(body)


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Any,
    op: str = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Any:
    """Reduce a tensor over ranks.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor or `tf.IndexedSlices` of equal dtype and shape on all ranks; float32,
            float64, float16, bfloat16, int32, int64, int8 or uint8.
        op: Average, Sum, Min, Max or Product.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        compression: What travels, see `Compression`.
        sparse_as_dense: Make IndexedSlices dense first.
        process_set: Who takes part.
        name: What logs and errors call it.

    Returns:
        The result, equal bit by bit on all ranks: values are added in rank order.

    Raises:
        ConfigError: Unknown op or dtype.
        ExchangeError: Ranks call different collectives (eager), or communication failed.
        PlanError: Called eagerly, and not on the main thread.
    """
    factors = Scaling(prescale_factor, postscale_factor)
    group = _members(process_set, "allreduce")
    if isinstance(tensor, tf.IndexedSlices):
        if not sparse_as_dense:
            return allreduce_sparse(tensor, op, factors, Call(group, name or "allreduce"))
        tensor = tf.convert_to_tensor(tensor)
    packed, context = compression.compress(tf.convert_to_tensor(tensor))
    result = _allreduce_all([packed], op, factors, Call(group, name or "allreduce"))[0]
    return compression.decompress(result, context)


@tf.autograph.experimental.do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    op: str = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce several tensors at once: those of one dtype travel as one message.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensors: Tensors; otherwise as `allreduce`.
        op: See `allreduce`, as the other arguments.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        compression: What travels.
        process_set: Who takes part.
        name: What logs and errors call it.

    Returns:
        One result per tensor, in order.

    Raises:
        ConfigError: Unknown op or dtype.
        ExchangeError: See `allreduce`.
        PlanError: Called eagerly, and not on the main thread.
    """
    group = _members(process_set, "grouped_allreduce")
    call = Call(group, name or "grouped_allreduce")
    packed = [compression.compress(tf.convert_to_tensor(t)) for t in tensors]
    results: list[Any] = [None] * len(packed)
    for dtype in dict.fromkeys(t.dtype for t, _ in packed):
        chosen = [i for i, (t, _) in enumerate(packed) if t.dtype == dtype]
        factors = Scaling(prescale_factor, postscale_factor)
        reduced = _allreduce_all([packed[i][0] for i in chosen], op, factors, call)
        for i, result in zip(chosen, reduced, strict=True):
            results[i] = compression.decompress(result, packed[i][1])
    return results


def _allreduce_all(
    tensors: list[tf.Tensor], op: str, factors: Scaling, call: Call
) -> list[tf.Tensor]:
    scaling = scaling_of(op, factors, call.group.size, tensors)
    reduce_op = engine_op(op)
    options = [reduce_op.name, float(scaling.prescale), float(scaling.postscale)]

    @tf.custom_gradient
    def reduce(*inputs: tf.Tensor) -> Any:
        outputs = _run(
            "allreduce",
            options,
            list(inputs),
            call,
            lambda: runtime.backend().allreduce(inputs, call, reduce_op, scaling),
        )

        def gradient(*errors: tf.Tensor) -> list[tf.Tensor]:
            if reduce_op is not ReduceOp.SUM:
                raise ConfigError(_NO_GRADIENT.format(op))
            back = Call(call.group, f"{call.label} gradient")
            return _allreduce_all([tf.convert_to_tensor(e) for e in errors], op, factors, back)

        return outputs, gradient

    return list(reduce(*tensors))


@tf.autograph.experimental.do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> tf.Tensor:
    """Return the tensor of one rank on all ranks.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor of any numeric dtype or bool; dtype and shape equal on all ranks.
        root_rank: Whose; a rank of the job, not a number within the process set.
        process_set: Who takes part.
        name: What logs and errors call it.

    Returns:
        The root's values.

    Raises:
        ConfigError: root_rank is not in the process set.
        ExchangeError: See `allreduce`.
        PlanError: Called eagerly, and not on the main thread.
    """
    group = _members(process_set, "broadcast")
    require_member(root_rank, group)
    root = group.ranks.index(root_rank)
    call = Call(group, name or "broadcast")

    @tf.custom_gradient
    def send(value: tf.Tensor) -> Any:
        output = _run(
            "broadcast",
            [root],
            [value],
            call,
            lambda: runtime.backend().broadcast(value, root, call),
        )

        def gradient(error: tf.Tensor) -> tf.Tensor:
            back = Call(group, f"{call.label} gradient")
            total = _allreduce_all([error], Sum, Scaling(), back)[0]
            return total if group.rank == root else tf.zeros_like(total)

        return output, gradient

    return send(tf.convert_to_tensor(tensor))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of the process set have called this. Eager only.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        process_set: Who takes part.

    Raises:
        ExchangeError: Ranks call different collectives, or communication failed.
        PlanError: Called eagerly, and not on the main thread.
    """
    group = _members(process_set, "barrier")
    call = Call(group, "barrier")
    _run("barrier", [], [], call, lambda: runtime.backend().allgather(tf.zeros([1]), call))


__all__ = ["Average", "Product", "Sum", "allreduce", "barrier", "broadcast", "grouped_allreduce"]


def _rows_before(rows: tf.Tensor, member: int) -> tf.Tensor:
    return tf.reduce_sum(rows[:member])


@tf.autograph.experimental.do_not_convert
def allgather(
    tensor: Any, *, process_set: ProcessSet = global_process_set, name: str | None = None
) -> tf.Tensor:
    """Put the tensors of all ranks one after another along dimension 0.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor of any numeric dtype or bool. The first dimension may differ between ranks
            and may be 0; a scalar counts as one row.
        process_set: Who takes part.
        name: What logs and errors call it.

    Returns:
        The rows of all ranks, in rank order.

    Raises:
        ExchangeError: Other dimensions or dtypes differ, or communication failed.
        PlanError: Called eagerly, and not on the main thread.
    """
    group = _members(process_set, "allgather")
    call = Call(group, name or "allgather")
    value = tf.convert_to_tensor(tensor)
    value = value[tf.newaxis] if value.shape.rank == 0 else value

    @tf.custom_gradient
    def gather(own: tf.Tensor) -> Any:
        output, rows = _run(
            "allgather", [], [own], call, lambda: runtime.backend().allgather(own, call)
        )

        def gradient(error: tf.Tensor) -> tf.Tensor:
            back = Call(group, f"{call.label} gradient")
            total = _allreduce_all([error], Sum, Scaling(), back)[0]
            begin = _rows_before(rows, group.rank)
            return total[begin : begin + rows[group.rank]]

        return output, gradient

    return gather(value)


def grouped_allgather(
    tensors: Sequence[Any],
    *,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Allgather several tensors, one after another; see `allgather`.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensors: As many on all ranks.
        process_set: Who takes part.
        name: What logs and errors call them, with a number each.

    Returns:
        One result per tensor, in order.

    Raises:
        ExchangeError: See `allgather`.
        PlanError: Called eagerly, and not on the main thread.
    """
    label = name or "grouped_allgather"
    return [
        allgather(t, process_set=process_set, name=f"{label}/{i}") for i, t in enumerate(tensors)
    ]


@tf.autograph.experimental.do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Any:
    """Send a part of the rows to each rank.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor of shape [rows, ...]; rows may differ between ranks.
        splits: Integers of shape [size]: how many rows each rank is sent, the first ones to rank
            0. None sends equal parts.
        process_set: Who takes part.
        name: What logs and errors call it.

    Returns:
        The received rows in rank order; with `splits` a pair of these and the number of rows
        received from each rank (int32, shape [size]).

    Raises:
        ConfigError: The rows cannot be split equally (no splits given), or splits is malformed.
        ExchangeError: Other dimensions or dtypes differ, or communication failed.
        PlanError: Called eagerly, and not on the main thread.
    """
    group = _members(process_set, "alltoall")
    call = Call(group, name or "alltoall")
    value = tf.convert_to_tensor(tensor)
    parts = (
        _equal_splits(value, group.size)
        if splits is None
        else _given_splits(splits, value, group.size)
    )

    @tf.custom_gradient
    def exchange(own: tf.Tensor) -> Any:
        output, rows = _run(
            "alltoall", [], [own], call, lambda: runtime.backend().alltoall(own, parts, call)
        )

        def gradient(error: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            back = Call(group, f"{call.label} gradient")
            return _run(
                "alltoall", [], [error], back, lambda: runtime.backend().alltoall(error, rows, back)
            )[0]

        return (output, rows), gradient

    output, rows = exchange(value)
    return output if splits is None else (output, tf.cast(rows, tf.int32))


def _equal_splits(value: tf.Tensor, size: int) -> tf.Tensor:
    if value.shape.rank == 0 or (value.shape[0] is not None and value.shape[0] % size):
        raise ConfigError(
            f"Without splits the rows must be a multiple of the {size} ranks. "
            f"Received: shape={value.shape}. Pass splits."
        )
    return tf.repeat(tf.shape(value, tf.int64)[:1] // size, size)


def _given_splits(splits: Any, value: tf.Tensor, size: int) -> tf.Tensor:
    parts = tf.convert_to_tensor(splits)
    if not parts.dtype.is_integer or parts.shape.rank not in (None, 1):
        raise ConfigError(
            "splits must be a vector of integers, one per rank. "
            f"Received: dtype={parts.dtype.name}, shape={parts.shape}."
        )
    if parts.shape.rank == 1 and parts.shape[0] not in (None, size):
        raise ConfigError(
            f"splits must hold one number of rows for each of the {size} ranks. "
            f"Received: {parts.shape[0]} numbers."
        )
    given = tf.get_static_value(parts)
    rows = value.shape[0] if value.shape.rank else None
    is_known = given is not None and rows is not None
    if is_known and (given.sum() != rows or (given < 0).any()):
        raise ConfigError(
            f"splits must be 0 or more and add up to the {rows} rows of the tensor. "
            f"Received: splits={given.tolist()}."
        )
    return tf.cast(parts, tf.int64)


@tf.autograph.experimental.do_not_convert
def reducescatter(
    tensor: Any,
    op: str = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> tf.Tensor:
    """Reduce a tensor over ranks and keep this rank's part of the rows.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor of shape [rows, ...], equal on all ranks. Where rows is no multiple of the
            number of ranks, the first ranks receive one row more.
        op: Average or Sum; Min, Max and Product without gradient.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        process_set: Who takes part.
        name: What logs and errors call it.

    Returns:
        Part r of the reduced rows, on the rank number r of the process set.

    Raises:
        ConfigError: A scalar, or an unknown op or dtype.
        ExchangeError: See `allreduce`.
        PlanError: Called eagerly, and not on the main thread.
    """
    group = _members(process_set, "reducescatter")
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0:
        raise ConfigError("reducescatter needs a tensor of rank 1 or more. Received: a scalar.")
    scaling = scaling_of(op, Scaling(prescale_factor, postscale_factor), group.size, [value])
    reduce_op = engine_op(op)
    options = [reduce_op.name, float(scaling.prescale), float(scaling.postscale)]
    call = Call(group, name or "reducescatter")

    @tf.custom_gradient
    def scatter(own: tf.Tensor) -> Any:
        output = _run(
            "reducescatter",
            options,
            [own],
            call,
            lambda: runtime.backend().reducescatter(own, call, reduce_op, scaling),
        )

        def gradient(error: tf.Tensor) -> tf.Tensor:
            if reduce_op is not ReduceOp.SUM:
                raise ConfigError(_NO_GRADIENT.format(op))
            factor = tf.constant(scaling.prescale * scaling.postscale, error.dtype)
            return allgather(error * factor, process_set=process_set, name=f"{call.label} gradient")

        return output, gradient

    return scatter(value)


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: str = Average,
    *,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors, one after another; see `reducescatter`.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensors: As many on all ranks.
        op: See `reducescatter`.
        process_set: Who takes part.
        name: What logs and errors call them, with a number each.

    Returns:
        One result per tensor, in order.

    Raises:
        ConfigError: See `reducescatter`.
        ExchangeError: See `allreduce`.
        PlanError: Called eagerly, and not on the main thread.
    """
    label = name or "grouped_reducescatter"
    return [
        reducescatter(t, op, process_set=process_set, name=f"{label}/{i}")
        for i, t in enumerate(tensors)
    ]
