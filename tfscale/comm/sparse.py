"""Sparse gradients: rows of a variable with their numbers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Scaling
from tfscale.comm.backends.horovod import scale
from tfscale.comm.eager import agree, header_of
from tfscale.comm.runtime import Average, Sum, engine_op, scaling_of
from tfscale.config import ConfigError


def deduplicate(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up the rows that have the same number.

    Args:
        slices: Values of shape [n, ...] and indices of shape [n].

    Returns:
        The same sum with each index once.
    """
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def allreduce_sparse(
    slices: tf.IndexedSlices, op: str, factors: Scaling, call: Call
) -> tf.IndexedSlices:
    """Gather the rows of all ranks; together they are the sum.

    Repeated rows are added up on each rank before they are sent (horovod#3328).

    Args:
        slices: This rank's rows; any number of them.
        op: Average or Sum.
        factors: Factors before and after the sum.
        call: Group, label and handles.

    Returns:
        The sum of all ranks' rows, each index once.

    Raises:
        ConfigError: The reduction has no sparse form.
        ExchangeError: Ranks call different collectives (eager), or communication failed.
    """
    if op not in (Average, Sum):
        raise ConfigError(
            f"Sparse tensors can be summed or averaged. Received: op={op}. "
            "Use sparse_as_dense=True."
        )
    own = deduplicate(slices)
    scaling = scaling_of(op, factors, call.group.size, [own.values])
    backend = runtime.backend()
    terms = scaling.terms(f"sparse {engine_op(op).name}") + _dense_shape_terms(own)
    if tf.executing_eagerly():
        agree(header_of("sparse allreduce", [terms], [own.values], call.label), call.group)

    def gather(what: str, rows: tf.Tensor) -> tf.Tensor:
        named = Call(call.group, f"{call.label} {what}", call.after, terms=terms)
        return backend.allgather(rows, named)[0]

    if own.dense_shape is not None and tf.get_static_value(own.dense_shape) is None:
        # Nothing is sent, but dimensions that are not known yet are compared.
        shape = tf.pad(own.dense_shape, [[1, 0]])
        gather("dense shape", tf.zeros(shape, tf.uint8))
    values, indices = gather("rows", own.values), gather("indices", own.indices)
    factor = scaling.prescale * scaling.postscale
    if values.dtype.is_integer:  # a mean of rounded shares would not be the mean
        rows = deduplicate(tf.IndexedSlices(values, indices, slices.dense_shape))
        return tf.IndexedSlices(scale(rows.values, factor), rows.indices, rows.dense_shape)
    # Keras's nonlinear rules (Adam squares each row) need each index once.
    return deduplicate(tf.IndexedSlices(scale(values, factor), indices, slices.dense_shape))


def _dense_shape_terms(slices: tf.IndexedSlices) -> str:
    if slices.dense_shape is None:
        return ", no dense shape"
    known = tf.get_static_value(slices.dense_shape)
    return "" if known is None else f", dense shape {np.asarray(known).tolist()}"


def is_cheaper_dense(slices: tf.IndexedSlices, size: int) -> bool:
    """Return whether a dense allreduce moves fewer bytes than gathering the rows.

    A rank sends its n rows to size - 1 others, or 2 * (size - 1) / size times the whole variable.

    Args:
        slices: A gradient whose row count may be known while tracing.
        size: Number of ranks.

    Returns:
        False where the number of rows is not known on all ranks.
    """
    if tf.executing_eagerly():  # only this rank's number is known then
        return False
    n_rows, variable = slices.values.shape[0], slices.dense_shape
    n_all = tf.get_static_value(variable[0]) if variable is not None else None
    return n_rows is not None and n_all is not None and n_rows * size >= 2 * n_all
