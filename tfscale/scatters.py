"""Collectives that reduce and leave each rank its rows: reducescatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale import runtime
from tfscale.backends.base import Call, ReduceOp, Scaling
from tfscale.collectives import _NO_GRADIENT, _members, _run
from tfscale.errors import ConfigError
from tfscale.gathers import allgather
from tfscale.process_sets import ProcessSet, global_process_set
from tfscale.reduce_ops import Average, engine_op, scaling_of


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
