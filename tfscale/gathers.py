"""Collectives that move rows: allgather and alltoall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale import runtime
from tfscale.backends.base import Call, Scaling
from tfscale.collectives import _allreduce_all, _members, _run
from tfscale.errors import ConfigError
from tfscale.process_sets import ProcessSet, global_process_set
from tfscale.reduce_ops import Sum


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
