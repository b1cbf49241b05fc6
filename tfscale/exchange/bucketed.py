"""Reducing gradients in buckets: what all strategies that sum whole gradients share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp
from tfscale.comm.eager import agree, header_of
from tfscale.comm.runtime import scaling_of
from tfscale.comm.sparse import allreduce_sparse, is_cheaper_dense
from tfscale.config import PlanError
from tfscale.exchange.base import GradientOptions
from tfscale.plan.buckets import Bucket, GradientSpec, group_buckets

ChooseBuckets = Callable[[list[GradientSpec]], Sequence[Bucket]]


def reduce_in_buckets(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    group: Group,
    options: GradientOptions,
    choose: ChooseBuckets,
    overlap: bool = True,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Return the reduced gradients, in order.

    Args:
        gradients: Tensors or IndexedSlices, one per variable; no None.
        variables: The variables they belong to.
        group: Who takes part.
        options: How they are reduced; groups chosen by the user come before `choose`.
        choose: Returns buckets for the dense gradients.
        overlap: False waits for all gradients before any is sent.

    Raises:
        PlanError: A gradient's shape is not known.
        ExchangeError: Communication failed.
    """
    if not overlap and not tf.executing_eagerly():
        with tf.control_dependencies([values_of(g) for g in gradients]):
            gradients = [_identity(g) for g in gradients]
    results: list[Any] = list(gradients)
    dense, sparse = [], []
    for i, gradient in enumerate(gradients):
        if not isinstance(gradient, tf.IndexedSlices):
            dense.append(i)
        elif options.sparse_as_dense or is_cheaper_dense(gradient, group.size):
            results[i] = tf.convert_to_tensor(gradient)
            dense.append(i)
        else:
            sparse.append(i)
    packed = [options.compression.compress(results[i]) for i in dense]
    own = [variables[i] for i in dense]
    specs = [_spec(v, tensor) for v, (tensor, _) in zip(own, packed, strict=True)]
    for bucket in _chosen_by_user(specs, own, options) or choose(specs):
        reduced = _reduce(bucket, [tensor for tensor, _ in packed], own, group, options)
        for position, tensor in zip(bucket.indices, reduced, strict=True):
            context = packed[position][1]
            results[dense[position]] = options.compression.decompress(tensor, context)
    # Slots start in this order, and an embedding's gradient is the last of back-propagation.
    for i in sparse:
        call = _call(group, [variables[i]])
        results[i] = allreduce_sparse(gradients[i], options.op, options.factors(), call)
    return results


def name_of(variable: Any) -> str:
    """Return what messages call a variable, or a tensor that is the source of a tape."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "gradient"))


def values_of(gradient: Any) -> tf.Tensor:
    """Return a gradient, or the values of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _identity(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.identity(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


def _chosen_by_user(
    specs: list[GradientSpec], variables: list[Any], options: GradientOptions
) -> Sequence[Bucket]:
    if options.groups is not None:
        places = {id(v): i for i, v in enumerate(variables)}
        chosen = [[places[id(v)] for v in g if id(v) in places] for g in options.groups]
        return group_buckets(specs, [g for g in chosen if g])
    if options.num_groups > 0 and specs:
        n = -(-len(specs) // options.num_groups)
        parts = [list(range(i, min(i + n, len(specs)))) for i in range(0, len(specs), n)]
        return group_buckets(specs, parts)
    return ()


def _spec(variable: Any, tensor: tf.Tensor) -> GradientSpec:
    shape = tensor.shape if tensor.shape.is_fully_defined() else variable.shape
    if any(d is None for d in shape):
        raise PlanError(
            "The shape of a gradient must be known. "
            f"Received: shape={tensor.shape} for {name_of(variable)}. Build the model first."
        )
    return GradientSpec(name_of(variable), tuple(int(d) for d in shape), tensor.dtype.name)


def _call(group: Group, variables: Sequence[Any]) -> Call:
    names = [name_of(v) for v in variables]
    label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
    # Sources of a tape may be tensors, which have no handle.
    after = tuple(v.handle for v in variables if hasattr(v, "handle"))
    return Call(group, label, after, names=tuple(names))


def _reduce(
    bucket: Bucket,
    tensors: list[tf.Tensor],
    variables: list[Any],
    group: Group,
    options: GradientOptions,
) -> list[tf.Tensor]:
    chosen = [tensors[i] for i in bucket.indices]
    scaling = scaling_of(options.op, options.factors(), group.size, chosen)
    call = _call(group, [variables[i] for i in bucket.indices])
    if tf.executing_eagerly():
        agree(header_of("gradients", [], chosen, call.label), group)
    return runtime.backend().allreduce(chosen, call, ReduceOp.SUM, scaling)
