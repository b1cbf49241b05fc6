"""Collectives on Python objects and variables. Eager, main thread only."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.collectives import broadcast, call_of, require_member
from tfscale.comm.eager import Header, agree, gather_bytes
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import ExchangeError

_PACKED_BYTES = 4 << 20  # of variables that are broadcast in one message


@dataclass(frozen=True)
class _Failure:
    """Sent in place of an object that cannot be pickled, so that all ranks raise the error."""

    text: str


def _pickled(obj: Any) -> tuple[bytes, Any]:
    """Return the pickle of an object and the object, or of a `_Failure` and that failure."""
    try:
        return pickle.dumps(obj), obj
    except Exception as error:  # of any class, as objects define their own pickling
        failure = _Failure(f"{type(error).__name__}: {error}")
        return pickle.dumps(failure), failure


def _require_sent(objects: Iterable[tuple[int, Any]]) -> None:
    for rank, obj in objects:
        if isinstance(obj, _Failure):
            raise ExchangeError(
                f"Objects must be picklable. Received: on rank {rank} one that is not: {obj.text}. "
                "Use functions and classes that are defined in a module."
            )


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks.

    Collective: all ranks must call this, in the same order.

    Args:
        obj: Anything that can be pickled.
        name: Name in logs and errors; the same on all ranks.
        process_set: The ranks that take part.

    Returns:
        One object per rank, in rank order.

    Raises:
        ExchangeError: Collectives or names differ between ranks, an object cannot be pickled, or
            communication failed.
    """
    if process_set.size() == 1:
        return [obj]
    call = call_of(process_set, "allgather_object", name)
    agree(Header("allgather_object", [call.label], [], [], call.label), call.group)
    received = [pickle.loads(data) for data in gather_bytes(_pickled(obj)[0], call)]
    _require_sent(zip(call.group.ranks, received, strict=True))
    return received


def raise_together(
    own: str,
    describe: Callable[[str], Exception],
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise an error on all ranks if any of them has one. Collective.

    Args:
        own: This rank's error in words; "" for none.
        describe: Makes the exception of the errors of all ranks, each with its rank before it.
        name: Name of the collective in logs and errors.
        process_set: The ranks that take part.
    """
    every = allgather_object(own, name, process_set)
    ranks = process_set.ranks or range(len(every))
    texts = [f"rank {rank}: {text}" for rank, text in zip(ranks, every, strict=True) if text]
    if texts:
        raise describe("; ".join(texts))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return one rank's object on all ranks.

    Collective: all ranks must call this, in the same order.

    Args:
        obj: Anything that can be pickled; ignored on other ranks than the root.
        root_rank: The rank whose object is sent.
        name: Name in logs and errors.
        process_set: The ranks that take part.

    Returns:
        The root's object; a copy of it on other ranks.

    Raises:
        ConfigError: root_rank is not in the process set.
        ExchangeError: See `allgather_object`.
    """
    require_member(root_rank, process_set.group())
    if process_set.size() == 1:
        return obj
    label = name or "broadcast_object"
    is_root = process_set.group().ranks[process_set.rank()] == root_rank
    packed, sent = _pickled(obj) if is_root else (b"", None)
    data = tf.constant(np.frombuffer(packed, np.uint8))
    own = tf.size(data, out_type=tf.int64)  # an int32 ends at 2 GiB
    length = broadcast(own, root_rank, process_set=process_set, name=f"{label} length")
    if not is_root:
        data = tf.zeros([int(length)], tf.uint8)
    received = broadcast(data, root_rank, process_set=process_set, name=label)
    if not is_root:
        sent = pickle.loads(received.numpy().tobytes())
    _require_sent([(root_rank, sent)])
    return sent


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give variables the values they have on one rank.

    Collective: all ranks must call this with equally many variables, of equal dtypes and shapes.

    Args:
        variables: `keras.Variable` or `tf.Variable` objects.
        root_rank: The rank whose values are sent.
        process_set: The ranks that take part.
        inplace: Ignored; kept for scripts written for Horovod.

    Raises:
        ConfigError: root_rank is not in the process set.
        ExchangeError: Variables differ between ranks; the text names the first.
    """
    del inplace
    require_member(root_rank, process_set.group())
    if process_set.size() == 1:
        return
    numeric = [v for v in variables if tf.as_dtype(v.dtype) != tf.string]
    if not tf.executing_eagerly():
        broadcast_(numeric, root_rank, process_set=process_set)
        return
    _require_alike(numeric, process_set)
    for packed in messages_of(numeric):
        if len(packed) == 1:
            broadcast_(packed, root_rank, process_set=process_set)
            continue
        flat = tf.concat([tf.reshape(v, [-1]) for v in packed], 0)
        label = f"{getattr(packed[0], 'path', packed[0].name)} and {len(packed) - 1} more"
        received = broadcast(flat, root_rank, process_set=process_set, name=label)
        sizes = [_n_values(v) for v in packed]
        for variable, values in zip(packed, tf.split(received, sizes), strict=True):
            variable.assign(tf.reshape(values, variable.shape))


def _require_alike(variables: Sequence[Any], process_set: ProcessSet) -> None:
    """Raise an error that names the first variable that is not alike on all ranks. Collective."""
    own = [f"{tf.as_dtype(v.dtype).name}{tf.TensorShape(v.shape)}" for v in variables]
    digest = hashlib.sha256(repr(own).encode()).digest()
    digests = allgather_object(digest, name="digest of variables", process_set=process_set)
    if len(set(digests)) == 1:
        return
    named = [f"{getattr(v, 'path', v.name)} {kind}" for v, kind in zip(variables, own, strict=True)]
    lists = allgather_object((own, named), name="kinds of variables", process_set=process_set)
    ranks = process_set.group().ranks
    kinds, names = lists[0]
    rank, (others, other_names) = next(
        (r, given) for r, given in zip(ranks, lists, strict=True) if given[0] != kinds
    )
    i = next(i for i, pair in enumerate(zip_longest(kinds, others)) if pair[0] != pair[1])
    here, there = ((*n, "no further variable")[min(i, len(n))] for n in (names, other_names))
    raise ExchangeError(
        "broadcast_variables needs as many variables on all ranks, of equal dtypes and shapes. "
        f"Received: {here} on rank {ranks[0]} and {there} on rank {rank}, as number {i} of "
        f"{len(kinds)} and {len(others)}. Build the same model on every rank, and the optimizer "
        "before you broadcast its variables."
    )


def _n_values(variable: Any) -> int | None:
    """Return the number of a variable's values; None where its shape may change."""
    return tf.TensorShape(variable.shape).num_elements()


def messages_of(variables: Sequence[Any]) -> list[list[Any]]:
    """Return the variables in messages: small ones of a dtype together, large ones alone.

    A model may have thousands of small variables, and each message takes a turn of the link.
    """
    messages: list[list[Any]] = []
    open_by_dtype: dict[tf.DType, list[Any]] = {}
    n_bytes: dict[tf.DType, int] = {}
    for variable in variables:
        dtype = tf.as_dtype(variable.dtype)
        n_values = _n_values(variable)
        size = _PACKED_BYTES + 1 if n_values is None else n_values * dtype.size
        if dtype not in open_by_dtype or n_bytes[dtype] + size > _PACKED_BYTES:
            open_by_dtype[dtype], n_bytes[dtype] = [], 0
            messages.append(open_by_dtype[dtype])
        open_by_dtype[dtype].append(variable)
        n_bytes[dtype] += size
    return messages


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Give variables the values they have on one rank, also inside a tf.function.

    Collective: all ranks must call this with as many variables, of equal dtypes and shapes.
    Arguments and errors are those of `broadcast`.

    Returns:
        The new values.
    """
    values = []
    for variable in variables:
        label = name or getattr(variable, "path", variable.name)
        value = broadcast(variable, root_rank, process_set=process_set, name=label)
        with tf.control_dependencies([variable.assign(value)]):
            values.append(tf.identity(value))
    return values


def is_homogeneous() -> bool:
    """Return whether all hosts run equally many processes.

    Collective: all ranks must call this.
    """
    return len(set(allgather_object(runtime.local_size(), name="processes of hosts"))) == 1
