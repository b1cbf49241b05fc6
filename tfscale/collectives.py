"""Collectives on tensors: eager or inside tf.function, differentiable.

Collective, all of them: every rank of the process set must call them, in the same order. Eager
calls check that all ranks call the same with equal types and shapes, and belong on the main
thread. Source of names and meaning: Horovod's TensorFlow API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale import runtime
from tfscale.backends.base import Call, Group, ReduceOp, Scaling
from tfscale.eager import agree, header_of, raise_own_errors
from tfscale.errors import ConfigError, ExchangeError
from tfscale.exchange.compression import Compression
from tfscale.exchange.sparse import allreduce_sparse
from tfscale.process_sets import ProcessSet, global_process_set
from tfscale.reduce_ops import Average, Product, Sum, engine_op, scaling_of

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
            float64, float16, bfloat16, int32 or int64.
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
