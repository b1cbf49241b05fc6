"""Collectives on Python objects and variables. Eager, main thread only."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
                f"rank {rank} gave an object that is not picklable. Received: {obj.text}. Use "
                "functions and classes that are defined in a module."
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

    Examples:
        >>> tfscale.init()
        >>> tfscale.allgather_object({"rank": tfscale.rank()})
        [{'rank': 0}]
        >>> ranks = tfscale.testing.FakeRanks(2)  # two ranks in one process
        >>> ranks.run(lambda rank: tfscale.allgather_object(f"host {rank}"))
        [['host 0', 'host 1'], ['host 0', 'host 1']]
    """
    if process_set.size() == 1:
        return [obj]
    call = call_of(process_set, "allgather_object", name)
    agree(Header("allgather_object", [call.label], [], [], call.label), call.group)
    received = [pickle.loads(data) for data in gather_bytes(_pickled(obj)[0], call)]
    _require_sent(zip(call.group.ranks, received, strict=True))
    return received


def raise_together(
    failure: str,
    describe: Callable[[str], Exception],
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise an error on all ranks if any of them has one. Collective.

    Args:
        failure: This rank's error in words; "" for none.
        describe: Makes the exception of the errors of all ranks, each with its rank before it.
        name: Name of the collective in logs and errors.
        process_set: The ranks that take part.
    """
    text_by_rank = allgather_object(failure, name, process_set)
    ranks = process_set.ranks or range(len(text_by_rank))
    texts = [f"rank {rank}: {text}" for rank, text in zip(ranks, text_by_rank, strict=True) if text]
    if texts:
        raise describe("; ".join(texts))


# Comparisons of the ranks.

_ENTRIES_SHOWN, _VALUES_SHOWN, _RANKS_SHOWN, _LETTERS_SHOWN = 3, 3, 8, 1000
_MISSING = object()


@dataclass(frozen=True)
class Named:
    """A value that ranks compare, and a name that errors show, by which they may differ."""

    name: str = field(compare=False)
    value: Any

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


def require_equal(
    value: Any,
    what: str,
    hint: str,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise an ExchangeError on all ranks unless they pass equal values. Collective.

    Args:
        value: This rank's value; see `require_equal_values`.
        what: What is compared; begins the text of the error.
        hint: What to do, in a sentence.
        name: Name of the collective in logs and errors; None for `what`.
        process_set: The ranks that take part.
    """
    values = allgather_object(value, name=name or what, process_set=process_set)
    ranks = process_set.ranks or range(len(values))
    require_equal_values(dict(zip(ranks, values, strict=True)), what, hint)


def require_equal_values(
    value_by_rank: Mapping[int, Any], what: str, hint: str, groups: Iterable[Sequence[int]] = ()
) -> None:
    """Raise an ExchangeError unless the values of ranks are equal, naming who has which.

    Args:
        value_by_rank: Of dicts, lists and sets the entries that differ are shown;
            bytes are digests, which are not shown, nor are long values.
        what: What is compared; begins the text of the error.
        hint: What to do, in a sentence.
        groups: The ranks whose values must be equal; all of them by default.
    """
    is_alike = len({type(value) for value in value_by_rank.values()}) == 1
    tables = {rank: _entries(v) if is_alike else {"": v} for rank, v in value_by_rank.items()}
    differing = []
    for label in dict.fromkeys(label for table in tables.values() for label in table):
        for ranks in groups or [list(value_by_rank)]:
            values = [tables[rank].get(label, _MISSING) for rank in ranks]
            if any(value != values[0] for value in values):
                differing.append(_difference(label, values, ranks))
    if differing:
        more = len(differing) - _ENTRIES_SHOWN
        shown = "; ".join(differing[:_ENTRIES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ExchangeError(f"{what} must be the same on all ranks. Received: {shown}. {hint}")


def _entries(value: Any) -> dict[str, Any]:
    """Return the entries of a value to compare, by the labels that errors show before them."""
    if isinstance(value, dict):
        return {f"{key}=": entry for key, entry in value.items()}
    if isinstance(value, list):
        return {f"number {i}: ": entry for i, entry in enumerate(value)}
    if isinstance(value, set):
        return dict.fromkeys(sorted(value), "")
    return {"": value}


def _difference(label: str, values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Return "momentum=0.5 on rank 0, 2 and momentum=0.9 on rank 1"."""
    name = label.rstrip(":= ")
    if any(isinstance(value, bytes) or len(str(value)) > _LETTERS_SHOWN for value in values):
        others = [rank for rank, value in zip(ranks, values, strict=True) if value != values[0]]
        return f"other {name or 'values'} on rank {listed(others)} than on rank {ranks[0]}"
    holders: list[tuple[Any, list[int]]] = []
    for rank, value in zip(ranks, values, strict=True):
        holding_ranks = next(
            (value_ranks for other, value_ranks in holders if other == value), None
        )
        if holding_ranks is None:
            holders.append((value, holding_ranks := []))
        holding_ranks.append(rank)
    texts = []
    for value, value_ranks in holders[:_VALUES_SHOWN]:
        text = f"no {name}" if value is _MISSING else f"{label}{value}"
        texts.append(f"{text} on rank {listed(value_ranks)}")
    others = [rank for _, value_ranks in holders[_VALUES_SHOWN:] for rank in value_ranks]
    return " and ".join([*texts, *([f"others on rank {listed(others)}"] if others else [])])


def listed(items: Sequence[Any], n_shown: int = _RANKS_SHOWN) -> str:
    """Return "0, 1, 2 and 5 more"."""
    more = len(items) - n_shown
    shown = ", ".join(map(str, items[:n_shown]))
    return f"{shown} and {more} more" if more > 0 else shown


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

    Examples:
        >>> tfscale.init()
        >>> settings = {"layers": 3} if tfscale.rank() == 0 else None
        >>> tfscale.broadcast_object(settings, root_rank=0)
        {'layers': 3}
    """
    require_member(root_rank, process_set.group())
    if process_set.size() == 1:
        return obj
    label = name or "broadcast_object"
    is_root = process_set.group().ranks[process_set.rank()] == root_rank
    packed, sent = _pickled(obj) if is_root else (b"", None)
    data = tf.constant(np.frombuffer(packed, np.uint8))
    n_bytes = tf.size(data, out_type=tf.int64)  # an int32 ends at 2 GiB
    length = broadcast(n_bytes, root_rank, process_set=process_set, name=f"{label} length")
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

    Examples:
        >>> def weight_after_broadcast(rank):
        ...     weight = tf.Variable([float(rank)])
        ...     tfscale.broadcast_variables([weight], root_rank=1)
        ...     return weight.numpy().tolist()
        >>> tfscale.init()
        >>> tfscale.testing.FakeRanks(2).run(weight_after_broadcast)  # two ranks in one process
        [[1.0], [1.0]]
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
        # In NumPy: an op of TensorFlow with n inputs or outputs takes time that grows as n squared.
        flat = np.concatenate([v.numpy().ravel() for v in packed])
        label = f"{getattr(packed[0], 'path', packed[0].name)} and {len(packed) - 1} more"
        received = broadcast(flat, root_rank, process_set=process_set, name=label).numpy()
        ends = np.cumsum([_n_values(v) for v in packed])
        for variable, values in zip(packed, np.split(received, ends[:-1]), strict=True):
            variable.assign(values.reshape(variable.shape))


def _require_alike(variables: Sequence[Any], process_set: ProcessSet) -> None:
    """Raise an error that names the first variable that is not alike on all ranks. Collective."""
    types = [f"{tf.as_dtype(v.dtype).name}{tf.TensorShape(v.shape)}" for v in variables]
    digest = hashlib.sha256(repr(types).encode()).digest()
    digests = allgather_object(digest, name="digest of variables", process_set=process_set)
    if len(set(digests)) == 1:
        return
    names = [f"number {i}, {getattr(v, 'path', v.name)}" for i, v in enumerate(variables)]
    require_equal(
        dict(zip(names, types, strict=True)),
        "The dtypes and shapes of variables that are broadcast",
        "Build the same model on every rank, and its optimizer before you broadcast its variables.",
        name="kinds of variables",
        process_set=process_set,
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

    Examples:
        >>> tfscale.init()
        >>> weight = tf.Variable([1.0, 2.0])
        >>> @tf.function(autograph=False)
        ... def synchronize():
        ...     return tfscale.broadcast_([weight], root_rank=0)
        >>> [value.numpy().tolist() for value in synchronize()]
        [[1.0, 2.0]]
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

    Examples:
        >>> tfscale.init()
        >>> tfscale.is_homogeneous()  # one rank on one host
        True
    """
    return len(set(allgather_object(runtime.local_size(), name="processes of hosts"))) == 1
