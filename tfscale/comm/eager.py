"""Eager collectives: agreement of the ranks, `join`, and the errors of collectives' ops."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Reduction
from tfscale.config import ConfigError, ExchangeError

# Errors that Horovod's ops raise as TensorFlow's: scripts catch either.


class PreconditionExchangeError(ExchangeError, tf.errors.FailedPreconditionError):
    """Ranks call different collectives."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class ArgumentExchangeError(ExchangeError, tf.errors.InvalidArgumentError):
    """A rank outside of the process set calls a collective."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


class ArgumentConfigError(ConfigError, tf.errors.InvalidArgumentError):
    """Rows cannot be split as requested."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


_ENGINE_TEXT = re.compile(r"TFSCALE_(FAILED|STOPPED): (.*?)(?=\n|$)")


def engine_text(message: str) -> str:
    """Return the engine's text within TensorFlow's message, or else the whole message."""
    match = _ENGINE_TEXT.search(message)
    # TensorFlow puts the node's name after the text of an op, on the same line.
    return re.sub(r"\s*\[\[\{\{node.*| \[Op:.*", "", match[2]) if match else message


def has_stopped(error: tf.errors.OpError) -> bool:
    """Return whether an error comes from a collective given up because another rank stopped."""
    return isinstance(error, tf.errors.AbortedError) and runtime.num_given_up() > 0


def is_exchange_error(error: tf.errors.OpError) -> bool:
    """Return whether an error comes from a collective: the engine's, or one of Horovod's.

    Horovod's texts have no mark of their own: they name Horovod, or its op in the line that
    TensorFlow adds.
    """
    if isinstance(error, tf.errors.InternalError):
        return True
    return bool(re.search(r"tfscale_failed|horovod|tfscale\.g\d", error.message.lower()))


def raise_own_errors(body: Callable[[], Any]) -> Any:
    """Run `body`; an error of a collective's op becomes an ExchangeError with the engine's text."""
    try:
        return body()
    except tf.errors.OpError as error:
        if not is_exchange_error(error) and not has_stopped(error):
            raise
        raise ExchangeError(engine_text(error.message)) from error


JOIN = "join"


@dataclass(frozen=True)
class Header:
    """Description of a call, compared between ranks; joined ranks make their zeros from it."""

    kind: str  # name of the collective
    options: list[Any]  # reduction, root and the like
    dtypes: list[str]
    shapes: list[list[int]]  # without the first dimension where that may differ
    label: str = ""  # for messages only; may differ
    number: int = -1  # of the call among the group's; -1 is not compared

    def describe(self) -> str:
        """Return the call as error messages show it."""
        tensors = ", ".join(f"{d}{s}" for d, s in zip(self.dtypes, self.shapes, strict=True))
        return f"{self.kind}({tensors}) {self.options or ''}".strip()

    def matches(self, other: Header) -> bool:
        """Return whether two ranks call the same collective."""
        return asdict(self) | {"label": ""} == asdict(other) | {"label": ""}


def header_of(kind: str, options: list[Any], tensors: list[tf.Tensor], label: str) -> Header:
    """Describe a call; the first dimension counts unless the collective allows it to differ."""
    first = 1 if kind in ("allgather", "alltoall", "sparse allreduce") else 0
    shapes = [list(t.shape)[first:] for t in tensors]
    return Header(kind, options, [t.dtype.name for t in tensors], shapes, label)


def gather_bytes(data: bytes, call: Call) -> list[bytes]:
    """Return the bytes of all members, in their order. Collective."""
    bytes_here = tf.constant(np.frombuffer(data, np.uint8))
    gathered, rows = raise_own_errors(lambda: runtime.backend().allgather(bytes_here, call))
    return [part.tobytes() for part in np.split(gathered.numpy(), np.cumsum(rows.numpy())[:-1])]


def exchange_headers(header: Header, group: Group) -> list[Header]:
    """Return the headers of all members, in their order. Collective."""
    call = Call(group, f"{header.kind} {header.label}".strip())
    return [
        Header(**json.loads(t)) for t in gather_bytes(json.dumps(asdict(header)).encode(), call)
    ]


def agree(header: Header, group: Group) -> None:
    """Check that all members call the same collective; ranks that joined take part in sums.

    Raises ExchangeError on every rank, with the same text.
    """
    header = replace(header, number=runtime.eager_calls()[group.id])
    while group.size > 1:
        headers = exchange_headers(header, group)
        latest = max(headers, key=lambda h: h.number)
        if header.number < latest.number:
            raise PreconditionExchangeError(
                "ranks ended a collective differently. Received: rank "
                f"{group.ranks[headers.index(latest)]} raised an error in it and calls "
                f"{latest.describe()} by now, while rank {group.ranks[group.rank]} calls "
                f"{header.describe()}. See the error of that rank, or catch this one too."
            )
        if _are_numbers_equal(headers):
            _common_header(headers, group)
            return
        # The ranks that are late raise this error and come with their next call.


def _are_numbers_equal(headers: list[Header]) -> bool:
    return len({h.number for h in headers if h.number >= 0}) == 1


def _common_header(headers: list[Header], group: Group) -> Header:
    """Return the header of the ranks that have not joined; raises ExchangeError as `agree`."""
    active = [(r, h) for r, h in zip(group.ranks, headers, strict=True) if h.kind != JOIN]
    joined = [r for r, h in zip(group.ranks, headers, strict=True) if h.kind == JOIN]
    first_rank, first = active[0]
    for rank, other in active[1:]:
        if not other.matches(first):
            raise PreconditionExchangeError(
                "ranks called different collectives, or one with other types or shapes. "
                f"Received: rank {first_rank} calls {first.describe()} and rank {rank} calls "
                f"{other.describe()}. Call the same functions, and give fit the same callbacks, "
                "on every rank."
            )
    # A joined rank contributes zeros, which is right in sums only.
    is_sum = first.kind == "allreduce" and first.options[0] == ReduceOp.SUM.name
    if joined and not is_sum:
        raise ExchangeError(
            f"rank {joined[0]} has joined, so that the others may call only allreduce with Sum "
            f"or Average, equal on all of them. Received: {first.describe()}. For training use "
            "tfscale.data.GlobalBatches: it gives every rank as many batches."
        )
    return first


_has_exchanged_gradients = False
_has_traced_gradients = False  # in a tf.function


def note_gradients() -> None:
    """Remember that training steps of this process exchange gradients."""
    global _has_exchanged_gradients, _has_traced_gradients
    _has_exchanged_gradients = True
    _has_traced_gradients = _has_traced_gradients or not tf.executing_eagerly()


def has_exchanged_gradients() -> bool:
    """Return whether a training step of this process has exchanged gradients."""
    return _has_exchanged_gradients


def join() -> int:
    """Take part in the allreduces of the other ranks with zeros until all have called join.

    Collective, eager only. For training use `tfscale.data.GlobalBatches`, which gives every rank
    the same number of batches, so that no rank has to wait for the others here.

    Returns:
        The highest rank of those that joined last; the same on all ranks.

    Raises:
        ExchangeError: Another rank calls a collective other than a sum or average, `join` is called
            inside a tf.function, or this process has traced steps of a distributed optimizer or
            tape.

    Examples:
        >>> tfscale.init()
        >>> n_batches = 3  # may differ between ranks
        >>> sums = [float(tfscale.allreduce(1.0, op=tfscale.Sum)) for _ in range(n_batches)]
        >>> tfscale.join()
        0
    """
    if not tf.executing_eagerly():
        raise ExchangeError(
            "join() must be called eagerly. Received: a call inside of a tf.function. For training "
            "use tfscale.data.GlobalBatches: it gives every rank as many batches."
        )
    if _has_traced_gradients and not runtime.is_single():
        raise ExchangeError(
            "join() cannot take part in the traced steps of a distributed optimizer. Received: a "
            "call after such a step. Give every rank as many batches instead: "
            "tfscale.data.GlobalBatches does."
        )
    group = runtime.world()
    n_rounds = 0
    while group.size > 1:
        headers = exchange_headers(Header(JOIN, [n_rounds], [], [], "join"), group)
        n_rounds += 1
        if all(h.kind == JOIN for h in headers):
            runtime.eager_calls().clear()
            return max(r for r, h in zip(group.ranks, headers, strict=True) if h.options == [0])
        if not _are_numbers_equal(headers):
            continue
        runtime.eager_calls()[group.id] = max(h.number for h in headers)
        common = _common_header(headers, group)
        op, *factors = common.options
        reduction = Reduction(ReduceOp[op], *factors)
        dtypes = [reduction.summed_as(tf.as_dtype(dtype)) for dtype in common.dtypes]
        zeros = [tf.zeros(s, d) for s, d in zip(common.shapes, dtypes, strict=True)]
        runtime.backend().allreduce(zeros, Call(group, common.label), reduction)
    return 0
