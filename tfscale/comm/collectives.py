"""Collectives on tensors, eagerly and in `tf.function`, with gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfscale.comm import eager, runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Reduction
from tfscale.comm.backends.horovod import scale
from tfscale.comm.compression import Compression, refuse_quantized
from tfscale.comm.runtime import Average, ProcessSet, Sum, global_process_set, reduction_of
from tfscale.config import ConfigError

_LOG = logging.getLogger("tfscale")
_F = TypeVar("_F", bound=Callable[..., Any])


def _not_converted(function: _F) -> _F:
    """Mark a function, whose type stays: AutoGraph would convert it in every traced function."""
    marked: _F = tf.autograph.experimental.do_not_convert(function)
    return marked


def call_of(process_set: ProcessSet, what: str, name: str | None = None) -> Call:
    """Return a call of the collective `what`; raises ExchangeError outside of the process set."""
    group = process_set.group()
    if group.rank < 0:
        raise eager.ArgumentExchangeError(
            f"{what} needs a member of the process set. Received: a call on rank "
            f"{runtime.rank()}, which is not in {list(group.ranks)}. Guard it with "
            "process_set.included()."
        )
    if tf.executing_eagerly():
        runtime.eager_calls()[group.id] += 1
    return Call(group, name or what)


def require_member(root_rank: int, group: Group) -> None:
    """Raise ConfigError unless a rank belongs to a group."""
    if root_rank not in group.ranks:
        raise ConfigError(
            f"root_rank must be one of {list(group.ranks)}. Received: root_rank={root_rank}."
        )


def _guarded(
    kind: str, options: list[Any], tensors: Sequence[tf.Tensor], call: Call, body: Callable[[], Any]
) -> Any:
    """Run `body`; eager ranks first check that all call the same collective."""
    if not tf.executing_eagerly():
        return body()
    eager.agree(eager.header_of(kind, options, list(tensors), call.label), call.group)
    return eager.raise_own_errors(body)


def _run(
    kind: str,
    options: list[Any],
    tensors: Sequence[tf.Tensor],
    call: Call,
    collective: Callable[..., tuple[Any, Any]],
    gradient: Callable[..., Any],
) -> Any:
    """Run a collective that has a gradient; `options` must be equal on all ranks.

    `collective` takes `tensors` and returns the outputs, and a value kept for `gradient`. That
    takes the kept value, a call for its own collective and one gradient per output, and returns
    the gradients of `tensors`.
    """

    @tf.custom_gradient
    def run(*inputs: tf.Tensor) -> Any:
        outputs, kept = _guarded(kind, options, inputs, call, lambda: collective(*inputs))

        def backward(*output_gradients: tf.Tensor) -> Any:
            back = Call(call.group, f"{call.label} gradient")
            return gradient(kept, back, *output_gradients)

        return outputs, backward

    return run(*tensors)


HOROVOD, ADJOINT = "horovod", "adjoint"
_warned: set[str] = set()


def _is_adjoint(gradient: str | None, what: str) -> bool:
    """Return whether the exact gradient is requested.

    Horovod's gradient is the mean of the ranks' output gradients, the adjoint is their sum. The
    mean is right for a loss that every rank computes from the same gathered values; for the sum of
    losses that differ between ranks it is 1/size of the gradient.
    """
    if gradient not in (None, HOROVOD, ADJOINT):
        raise ConfigError(
            f"gradient must be 'horovod' or 'adjoint'. Received: gradient={gradient!r} of {what}."
        )
    return gradient == ADJOINT


def _warn_once(gradient: str | None, what: str, size: int) -> None:
    if gradient is None and size > 1 and what not in _warned:
        _warned.add(what)
        _LOG.warning(
            "The gradient of %s is Horovod's: the mean of the output gradients of all ranks. Pass "
            "gradient='adjoint' for their sum, the exact gradient of the sum of all ranks' losses, "
            "or gradient='horovod' to silence this.",
            what,
        )


def _require_sum(reduction: Reduction) -> None:
    if reduction.op is not ReduceOp.SUM:
        raise ConfigError(
            "op must be Sum or Average for gradients. Received: "
            f"op={reduction.op.name.capitalize()}."
        )


def _compared(reduction: Reduction) -> list[Any]:
    """Return the values that must be equal on all ranks; `join` reads them too."""
    return [reduction.op.name, float(reduction.prescale), float(reduction.postscale)]


def _narrowed(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return a sum in its values' dtype; an integer that this does not hold becomes the nearest."""
    if value.dtype == dtype:
        return value
    return tf.cast(tf.clip_by_value(value, int(dtype.min), int(dtype.max)), dtype)


def _reduce(tensors: Sequence[tf.Tensor], reduction: Reduction, call: Call) -> list[tf.Tensor]:
    """Reduce tensors of one dtype as one message."""
    tensors = [tf.convert_to_tensor(t) for t in tensors]
    runtime.require_reducible(tensors)

    def collective(*tensors: tf.Tensor) -> tuple[Any, Any]:
        dtype = tensors[0].dtype
        wide = [tf.cast(value, reduction.summed_as(dtype)) for value in tensors]
        sums = runtime.backend().allreduce(wide, call, reduction)
        return [_narrowed(total, dtype) for total in sums], None

    def gradient(_: Any, back: Call, *output_gradients: tf.Tensor) -> list[tf.Tensor]:
        _require_sum(reduction)
        return _reduce(output_gradients, reduction, back)

    return list(_run("allreduce", _compared(reduction), tensors, call, collective, gradient))


def _reduce_all(
    tensors: Sequence[Any], reduction: Reduction, compression: Any, call: Call
) -> list[tf.Tensor]:
    refuse_quantized(compression, call.label)
    packed = [compression.compress(tf.convert_to_tensor(t)) for t in tensors]
    results: list[Any] = [None] * len(packed)
    for dtype in dict.fromkeys(t.dtype for t, _ in packed):
        chosen = [i for i, (t, _) in enumerate(packed) if t.dtype == dtype]
        reduced = _reduce([packed[i][0] for i in chosen], reduction, call)
        for i, result in zip(chosen, reduced, strict=True):
            results[i] = compression.decompress(result, packed[i][1])
    return results


@_not_converted
def allreduce(
    tensor: Any,
    op: str = Average,
    *,
    average: bool | None = None,
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
        average: Horovod's older spelling: True for Average, False for Sum; replaces `op`.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        compression: The dtype that is sent, see `Compression`.
        sparse_as_dense: Make IndexedSlices dense first.
        process_set: The ranks that take part.
        name: Name in logs and errors.

    Returns: The result, equal bit by bit on all ranks: values are added in rank order. Averages and
        scaled sums of integers are added up in 64 bits and truncated, and results out of range
        saturate; plain sums of integers wrap, as in NumPy.

    Raises:
        ConfigError: Unknown op or dtype.
        ExchangeError: Ranks call different collectives (eager), or communication failed.
        PlanError: Called eagerly outside of the main thread.

    Examples:
        >>> tfscale.init()
        >>> tfscale.allreduce(tf.constant([1.0, 2.0]), prescale_factor=2.0).numpy().tolist()
        [2.0, 4.0]
        >>> ranks = tfscale.testing.FakeRanks(2)  # two ranks in one process
        >>> ranks.run(lambda rank: float(tfscale.allreduce(float(rank))))
        [0.5, 0.5]
    """
    call = call_of(process_set, "allreduce", name)
    op = op if average is None else Average if average else Sum
    reduction = reduction_of(op, call.group.size, prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices) and not sparse_as_dense:
        return allreduce_sparse(tensor, reduction, call, op == Average)
    return _reduce_all([tensor], reduction, compression, call)[0]


@_not_converted
def grouped_allreduce(
    tensors: Sequence[Any],
    op: str = Average,
    *,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors at once: dense ones of one dtype are sent as one message.

    Collective: all ranks of the process set must call this, in the same order. Arguments and
    errors are those of `allreduce`.

    Returns:
        One result per tensor, in order.

    Examples:
        >>> tfscale.init()
        >>> sums = tfscale.grouped_allreduce([tf.ones([2]), tf.constant([3])], op=tfscale.Sum)
        >>> [each.numpy().tolist() for each in sums]
        [[1.0, 1.0], [3]]
    """
    call = call_of(process_set, "grouped_allreduce", name)
    op = op if average is None else Average if average else Sum
    reduction = reduction_of(op, call.group.size, prescale_factor, postscale_factor)
    dense = [t for t in tensors if not isinstance(t, tf.IndexedSlices)]
    reduced = iter(_reduce_all(dense, reduction, compression, call))
    return [
        allreduce_sparse(t, reduction, Call(call.group, f"{call.label}/{i}"), op == Average)
        if isinstance(t, tf.IndexedSlices)
        else next(reduced)
        for i, t in enumerate(tensors)
    ]


@_not_converted
def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    gradient: str | None = None,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> tf.Tensor:
    """Return the tensor of one rank on all ranks.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor of any numeric dtype or bool; dtype and shape equal on all ranks.
        root_rank: The rank whose tensor is sent, numbered in the job, not in the process set.
        gradient: "horovod" (the default): the root's gradient is the mean of all ranks' output
            gradients, as in Horovod. "adjoint": their sum.
        process_set: The ranks that take part.
        name: Name in logs and errors.

    Returns:
        The root's values.

    Raises:
        ConfigError: root_rank is not in the process set, or the gradient is unknown.
        ExchangeError: See `allreduce`.
        PlanError: Called eagerly outside of the main thread.

    Examples:
        >>> tfscale.init()
        >>> tfscale.broadcast(tf.fill([2], tfscale.rank()), root_rank=0).numpy().tolist()
        [0, 0]
    """
    call = call_of(process_set, "broadcast", name)
    require_member(root_rank, call.group)
    root = call.group.ranks.index(root_rank)
    backward_op = Sum if _is_adjoint(gradient, "broadcast") else Average

    def collective(own: tf.Tensor) -> tuple[Any, Any]:
        return runtime.backend().broadcast(own, root, call), None

    def backward(_: Any, back: Call, output_gradient: tf.Tensor) -> tf.Tensor:
        _warn_once(gradient, "broadcast", call.group.size)
        total = _reduce([output_gradient], reduction_of(backward_op, call.group.size), back)[0]
        return total if call.group.rank == root else tf.zeros_like(total)

    value = tf.convert_to_tensor(tensor)
    return _run("broadcast", [root], [value], call, collective, backward)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of the process set have called this. Eager, main thread only.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        process_set: The ranks that take part.

    Raises:
        ExchangeError: Ranks call different collectives, or communication failed.
        PlanError: Called eagerly outside of the main thread.

    Examples:
        >>> from pathlib import Path
        >>> tfscale.init()
        >>> if tfscale.rank() == 0:
        ...     n_written = Path("vocabulary.txt").write_text("one two")
        >>> tfscale.barrier()
        >>> Path("vocabulary.txt").read_text()  # no rank reads before rank 0 has written
        'one two'
    """
    call = call_of(process_set, "barrier")
    _guarded("barrier", [], [], call, lambda: runtime.backend().allgather(tf.zeros([1]), call))


@_not_converted
def allgather(
    tensor: Any,
    *,
    gradient: str | None = None,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> tf.Tensor:
    """Put the tensors of all ranks one after another along dimension 0.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor of any numeric dtype or bool. The first dimension may differ between ranks
            and may be 0; a scalar counts as one row.
        gradient: "horovod" (the default): the mean of all ranks' output gradients for this rank's
            rows, as in Horovod. "adjoint": their sum.
        process_set: The ranks that take part.
        name: Name in logs and errors.

    Returns:
        The rows of all ranks, in rank order.

    Raises:
        ConfigError: The gradient is unknown.
        ExchangeError: Other dimensions or dtypes differ, or communication failed.
        PlanError: Called eagerly outside of the main thread.

    Examples:
        >>> tfscale.init()
        >>> rows = tf.fill([2, 3], tfscale.rank())
        >>> tfscale.allgather(rows).shape[0] == 2 * tfscale.size()
        True
        >>> tfscale.allgather(rows).numpy().tolist()
        [[0, 0, 0], [0, 0, 0]]
    """
    call = call_of(process_set, "allgather", name)
    backward_op = Sum if _is_adjoint(gradient, "allgather") else Average
    value = tf.convert_to_tensor(tensor)
    value = value[tf.newaxis] if value.shape.rank == 0 else value

    def collective(own: tf.Tensor) -> tuple[Any, Any]:
        return runtime.backend().allgather(own, call)

    def backward(rows: tf.Tensor, back: Call, output_gradient: tf.Tensor) -> tf.Tensor:
        _warn_once(gradient, "allgather", call.group.size)
        total = _reduce([output_gradient], reduction_of(backward_op, call.group.size), back)[0]
        rank = call.group.rank
        begin = tf.reduce_sum(rows[:rank])
        return total[begin : begin + rows[rank]]

    return _run("allgather", [], [value], call, collective, backward)


def grouped_allgather(
    tensors: Sequence[Any],
    *,
    gradient: str | None = None,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Allgather several tensors, one after another.

    Collective: all ranks of the process set must call this, in the same order, with the same
    number of tensors. Arguments and errors are those of `allgather`; the number of each tensor is
    added to `name`.

    Returns:
        One result per tensor, in order.

    Examples:
        >>> tfscale.init()
        >>> rows, labels = tfscale.grouped_allgather([tf.zeros([2, 3]), tf.constant([1, 0])])
        >>> rows.shape, labels.numpy().tolist()
        (TensorShape([2, 3]), [1, 0])
    """
    label = name or "grouped_allgather"
    return [
        allgather(t, gradient=gradient, process_set=process_set, name=f"{label}/{i}")
        for i, t in enumerate(tensors)
    ]


@_not_converted
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
        splits: Integers of shape [size]: the number of rows sent to each rank, in rank order. None
            sends equal parts.
        process_set: The ranks that take part.
        name: Name in logs and errors.

    Returns:
        The received rows in rank order; with `splits` a pair of these and the number of rows
        received from each rank (int32, shape [size]).

    Raises:
        ConfigError: The rows cannot be split equally (no splits given), or splits is malformed.
        ExchangeError: Other dimensions or dtypes differ, or communication failed.
        PlanError: Called eagerly outside of the main thread.

    Examples:
        >>> tfscale.init()
        >>> received, counts = tfscale.alltoall(tf.constant([5, 7]), splits=[2])  # by rank
        >>> received.numpy().tolist(), counts.numpy().tolist()
        ([5, 7], [2])
    """
    call = call_of(process_set, "alltoall", name)
    value, size = tf.convert_to_tensor(tensor), call.group.size
    parts = _equal_splits(value, size) if splits is None else _given_splits(splits, value, size)
    received, rows = _alltoall(value, parts, call)
    return received if splits is None else (received, tf.cast(rows, tf.int32))


def _alltoall(value: tf.Tensor, parts: tf.Tensor, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
    def collective(own: tf.Tensor) -> tuple[Any, Any]:
        received, rows = runtime.backend().alltoall(own, parts, call)
        return (received, rows), rows

    def gradient(rows: tf.Tensor, back: Call, output_gradient: tf.Tensor, _: Any) -> tf.Tensor:
        return _alltoall(output_gradient, rows, back)[0]

    return _run("alltoall", [], [value], call, collective, gradient)


def _equal_splits(value: tf.Tensor, size: int) -> tf.Tensor:
    if value.shape.rank == 0 or (value.shape[0] is not None and value.shape[0] % size):
        raise eager.ArgumentConfigError(
            f"splits must be given unless the {size} ranks divide the rows. Received: "
            f"shape={value.shape}. Pass splits."
        )
    return tf.repeat(tf.shape(value, tf.int64)[:1] // size, size)


def _given_splits(splits: Any, value: tf.Tensor, size: int) -> tf.Tensor:
    parts = tf.convert_to_tensor(splits)
    if not parts.dtype.is_integer or not parts.shape.is_compatible_with([size]):
        raise eager.ArgumentConfigError(
            f"splits must be a vector of integers, a number of rows for each of the {size} ranks. "
            f"Received: dtype={parts.dtype.name}, shape={parts.shape}."
        )
    split_values = tf.get_static_value(parts)
    rows = value.shape[0] if value.shape.rank else None
    is_known = split_values is not None and rows is not None
    if is_known and (split_values.sum() != rows or (split_values < 0).any()):
        raise eager.ArgumentConfigError(
            f"splits must be 0 or more and add up to the {rows} rows of the tensor. "
            f"Received: splits={split_values.tolist()}."
        )
    return tf.cast(parts, tf.int64)


@_not_converted
def reducescatter(
    tensor: Any,
    op: str = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    gradient: str | None = None,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> tf.Tensor:
    """Reduce a tensor over ranks and keep this rank's part of the rows.

    Collective: all ranks of the process set must call this, in the same order.

    Args:
        tensor: Tensor of shape [rows, ...], of equal shape and dtype on all ranks. Where `rows` is
            not a multiple of the number of ranks, the first ranks receive one row more.
        op: Average or Sum; Min, Max and Product without gradient.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        gradient: "horovod" (the default): the output gradients of all ranks, times the factors,
            times the number of ranks under Sum, as in Horovod. "adjoint": 1/size of that.
        process_set: The ranks that take part.
        name: Name in logs and errors.

    Returns:
        Part r of the reduced rows, on rank r of the process set.

    Raises:
        ConfigError: The tensor is a scalar, or the op, gradient or dtype is unknown.
        ExchangeError: See `allreduce`.
        PlanError: Called eagerly outside of the main thread.

    Examples:
        >>> tfscale.init()
        >>> rows = tf.constant([[1.0], [2.0], [3.0]])
        >>> tfscale.reducescatter(rows, op=tfscale.Sum).numpy().tolist()  # two ranks: 2 rows, 1
        [[1.0], [2.0], [3.0]]
    """
    call = call_of(process_set, "reducescatter", name)
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0:
        raise ConfigError("reducescatter needs a tensor of rank 1 or more. Received: a scalar.")
    is_adjoint = _is_adjoint(gradient, "reducescatter")
    reduction = reduction_of(op, call.group.size, prescale_factor, postscale_factor)
    runtime.require_reducible([value])

    def collective(value: tf.Tensor) -> tuple[Any, Any]:
        wide = tf.cast(value, reduction.summed_as(value.dtype))
        return _narrowed(runtime.backend().reducescatter(wide, call, reduction), value.dtype), None

    def backward(_: Any, back: Call, output_gradient: tf.Tensor) -> tf.Tensor:
        _require_sum(reduction)
        _warn_once(gradient, "reducescatter", call.group.size)
        factor = reduction.prescale * reduction.postscale
        factor *= 1 if is_adjoint else call.group.size
        scaled = output_gradient * tf.constant(factor, output_gradient.dtype)
        return allgather(scaled, gradient=gradient, process_set=process_set, name=back.label)

    return _run("reducescatter", _compared(reduction), [value], call, collective, backward)


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: str = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    gradient: str | None = None,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors, one after another.

    Collective: all ranks of the process set must call this, in the same order, with the same
    number of tensors. Arguments and errors are those of `reducescatter`; the number of each tensor
    is added to `name`.

    Returns:
        One result per tensor, in order.

    Examples:
        >>> tfscale.init()
        >>> parts = tfscale.grouped_reducescatter([tf.ones([4]), tf.ones([2, 3])], op=tfscale.Sum)
        >>> [tuple(part.shape) for part in parts]  # (2,) and (1, 3) on each of two ranks
        [(4,), (2, 3)]
    """
    label = name or "grouped_reducescatter"
    options: dict[str, Any] = {
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "gradient": gradient,
        "process_set": process_set,
    }
    return [reducescatter(t, op, **options, name=f"{label}/{i}") for i, t in enumerate(tensors)]


# Sparse tensors: rows of a variable and their indices.


def deduplicate(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up rows with equal indices, so that each index occurs once."""
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def allreduce_sparse(
    slices: tf.IndexedSlices,
    reduction: Reduction,
    call: Call,
    is_mean: bool = False,
    keeps_repeats: bool = False,
) -> tf.IndexedSlices:
    """Sum or average sparse tensors: gather the rows of all ranks, add up those of equal index.

    Rows with equal indices are added up on each rank before they are sent (horovod#3328). With
    `is_mean` integers become floats. With `keeps_repeats` rows are gathered as they are.
    """
    if reduction.op is not ReduceOp.SUM:
        raise ConfigError(
            "sparse tensors need op=Sum or Average. Received: "
            f"op={reduction.op.name.capitalize()}. Use sparse_as_dense=True."
        )
    runtime.require_reducible([slices.values])
    dtype = slices.values.dtype
    # Rows of one rank may have equal indices: their sum may overflow where there is one rank, too.
    is_wide = is_mean and dtype.is_integer
    wide = tf.cast(slices.values, tf.int64 if is_wide else reduction.summed_as(dtype))
    slices = tf.IndexedSlices(wide, slices.indices, slices.dense_shape)
    sent_slices = slices if keeps_repeats else deduplicate(slices)
    terms = reduction.terms("sparse") + _dense_shape_terms(sent_slices)
    terms += f", indices {slices.indices.dtype.name}, values {dtype.name}"
    if tf.executing_eagerly():
        eager.agree(
            eager.header_of("sparse allreduce", [terms], [sent_slices.values], call.label),
            call.group,
        )

    def gather(what: str, rows: tf.Tensor) -> tf.Tensor:
        named = Call(call.group, f"{call.label} {what}", call.after, terms=terms)
        return runtime.backend().allgather(rows, named)[0]

    if sent_slices.dense_shape is not None and tf.get_static_value(sent_slices.dense_shape) is None:
        # A tensor without elements: it only compares dimensions that are unknown while tracing.
        shape = tf.pad(sent_slices.dense_shape, [[1, 0]])
        gather("dense shape", tf.zeros(shape, tf.uint8))
    values, indices = gather("rows", sent_slices.values), gather("indices", sent_slices.indices)
    factor = reduction.prescale * reduction.postscale
    if values.dtype.is_integer:  # a mean of rounded shares would not be the mean
        values = values / 1 if is_mean else values  # floats, as in Horovod
        rows = deduplicate(tf.IndexedSlices(values, indices, slices.dense_shape))
        floats = tf.float32 if dtype.size < tf.int32.size else tf.float64  # as `values / 1`
        result = scale(rows.values, factor)
        result = tf.cast(result, floats) if is_mean else _narrowed(result, dtype)
        return tf.IndexedSlices(result, rows.indices, rows.dense_shape)
    rows = tf.IndexedSlices(scale(values, factor), indices, slices.dense_shape)
    # Keras's nonlinear rules (Adam squares each row) need each index once.
    return rows if keeps_repeats else deduplicate(rows)


def _dense_shape_terms(slices: tf.IndexedSlices) -> str:
    if slices.dense_shape is None:
        return ", no dense shape"
    dense_shape = tf.get_static_value(slices.dense_shape)
    return "" if dense_shape is None else f", dense shape {np.asarray(dense_shape).tolist()}"


def is_cheaper_dense(slices: tf.IndexedSlices, size: int) -> bool:
    """Return whether a dense allreduce is known to send fewer bytes than gathering the rows.

    Gathering sends a rank's n rows to size - 1 others; a dense allreduce sends
    2 * (size - 1) / size times the whole variable.
    """
    if tf.executing_eagerly():  # the other ranks' numbers of rows are unknown
        return False
    n_rows, variable = slices.values.shape[0], slices.dense_shape
    n_all = tf.get_static_value(variable[0]) if variable is not None else None
    return n_rows is not None and n_all is not None and n_rows * size >= 2 * n_all
