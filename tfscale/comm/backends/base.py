"""The protocol of a backend, and the backend of a single process."""

from __future__ import annotations

import enum
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.internals.keras import raw_variable
from tfscale.plan.segments import SegmentedBucket


class ReduceOp(enum.IntEnum):
    """Reduction of values over ranks, numbered as in the C++ engine."""

    SUM = 0
    MIN = 1
    MAX = 2
    PRODUCT = 3


class MarkKind(enum.IntEnum):
    """Reason why a rank takes part in no further step for now, numbered as in the C++ engine."""

    EPOCH_END = 0
    STOP = 1
    LEFT = 2


@dataclass(frozen=True)
class Group:
    """A set of ranks that communicate among themselves."""

    id: int  # equal on all ranks; 0 is the group of all
    ranks: tuple[int, ...]  # members in ascending order
    rank: int  # this process's place among the members, or -1 if it is not a member

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass(frozen=True)
class Call:
    """One use of a collective.

    Attributes:
        group: The ranks that take part.
        label: Name in logs and errors.
        after: Resource handles of the variables whose gradients are exchanged. The collective
            then starts as soon as its inputs exist; without handles, collectives of a traced
            function run in the order in which they were traced.
        stream: Collectives of one function and stream start in the order of tracing; those of
            different streams do not wait for each other. "" separates gradients from calls.
        names: Names of the tensors, if each has one; errors name the one that differs.
        terms: Text that must be equal on all ranks, besides the tensors' dtypes and shapes.
        is_patient: Its caller has a time limit, and other ranks may never join. Only a rank that
            has left or failed ends it. It has a stream of its own.
    """

    group: Group
    label: str
    after: tuple[Any, ...] = field(default=(), compare=False)
    stream: str = ""
    names: tuple[str, ...] = ()
    terms: str = ""
    is_patient: bool = False


@dataclass(frozen=True)
class Reduction:
    """A reduction with factors around it: postscale * reduce(prescale * x)."""

    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0

    def terms(self, kind: str = "") -> str:
        """Return the text that must be equal on all ranks; `kind` begins it."""
        factors = f"(factors {float(self.prescale)} and {float(self.postscale)})"
        return f"{kind} {self.op.name} {factors}".lstrip()

    def summed_as(self, dtype: tf.DType) -> tf.DType:
        """Return the dtype to add values up in: int64 for scaled sums of all integers.

        A mean is in the range of its values, but their sum may not be.
        """
        is_scaled = self.op is ReduceOp.SUM and (self.prescale != 1.0 or self.postscale != 1.0)
        return tf.int64 if is_scaled and dtype.is_integer else dtype


Tensors = Sequence[tf.Tensor]


@dataclass(frozen=True)
class Quantization:
    """Bits, blocks and parts of a quantised sum, and the errors of earlier ones.

    Attributes:
        bits: Bits per value: 16, 8 or 4; int32.
        block: Values that share a scale.
        cuts: For each tensor the elements at which the parts of the members begin, and its end.
        errors: Added to each tensor; empty if nothing is kept.
        owner_errors: Added to this member's parts of the results, flat.
    """

    bits: tf.Tensor
    block: int
    cuts: tuple[tuple[int, ...], ...]
    errors: Sequence[tf.Tensor] = ()
    owner_errors: Sequence[tf.Tensor] = ()


@dataclass(frozen=True)
class Sparsity:
    """The values that are sent of a sparse sum; see `Compression.sparse`.

    Attributes:
        share: Share of each chunk's values.
        chunk: Values of which the largest are sent.
        decay: Factor of what earlier sums have not sent.
        cuts: As for `Quantization`; between chunks.
    """

    share: float
    chunk: int
    decay: float
    cuts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Quantized:
    """Quantised sums, and the errors for the next ones in the order of `Quantization`."""

    sums: list[tf.Tensor]  # of a reduce-scatter: one, this member's parts one after another
    errors: list[tf.Tensor]
    owner_errors: list[tf.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Changes:
    """The format of a gather that sends changes of float32 variables with few bits.

    Attributes:
        bits: Bits per value: 32 for the values as they are, 16, 8 or 4; int32.
        block: Number of values that share a scale.
        is_coded: For each variable, whether its changes are sent and not its values.
    """

    bits: Any
    block: int
    is_coded: tuple[bool, ...]


@dataclass(frozen=True)
class Traffic:
    """Seconds that ranks have waited, and bytes exchanged, since the job began.

    Attributes:
        waited_s: For each rank, the seconds in which it had begun a collective and a rank that it
            needed had not. Other ranks report theirs once a second. Empty if not counted.
        n_bytes: Bytes that this rank has given to collectives.
    """

    waited_s: tuple[float, ...] = ()
    n_bytes: int = 0


# Rows of all members, and the number of rows that came from each (int64).
Rows = tuple[tf.Tensor, tf.Tensor]


class Backend(Protocol):
    """Moves tensors between ranks. Collective: all members call the same, in the same order.

    The default methods suit a backend without a thread of its own: nothing is pending after a call
    returns, nothing is recorded, and a rank does not learn that another stops. Each backend defines
    the methods that have no body here.
    """

    name: str  # "engine", "horovod" or "single"
    # A waiting rank learns of another's mark. Without marks ranks ask each other before each step.
    has_marks: bool
    records_events: bool = False  # the times when collectives are posted, start and end
    is_crowded: bool = False  # more ranks than cores share this host
    libraries: tuple[str, ...] = ()  # that carry its messages: "mpi", "gloo"
    thread_level: int = 0  # of MPI: 2 is SERIALIZED, 3 MULTIPLE; 0 without MPI
    rank: int
    size: int
    local_rank: int  # among the processes of this host
    local_size: int
    cross_rank: int  # of this host among those that have a process with this local rank
    cross_size: int

    def allreduce(self, tensors: Tensors, call: Call, reduction: Reduction) -> list[tf.Tensor]:
        """Reduce each tensor over the group; together they are one message."""

    def post_allreduce(
        self, tensors: Tensors, variables: Sequence[Any], call: Call, reduction: Reduction
    ) -> None:
        """Start reducing each tensor into a variable of its dtype and shape, without waiting.

        Readers of a variable must call `await_variables` first. In a traced function only: eagerly
        the variables are set when the call returns.
        """
        reduced = self.allreduce(tensors, call, reduction)
        raw = [raw_variable(v) for v in variables]
        self.await_variables([v.handle for v in raw], is_write=True)
        for variable, value in zip(raw, reduced, strict=True):
            variable.assign(value)

    def post_coded(
        self,
        tensors: Tensors,
        sums: Any,
        residuals: Sequence[Any],
        coding: Quantization | Sparsity,
        call: Call,
        reduction: Reduction,
    ) -> None:
        """Start reducing tensors into a vector of all, sent with few bits or in part.

        Does not wait: readers of `sums` and `residuals` must call `await_variables` first.
        `residuals` are variables of what earlier sums have not sent: for each tensor one, and for
        quantised sums then one for this member's part of each; none if nothing is kept. They are
        read, and set together with `sums`; a failed sum leaves them as they are.
        """
        self.quantized_allreduce(tensors, Quantization(tf.constant(0), 0, ()), call, reduction)

    def merge(self, variables: Sequence[Any], vectors: Tensors, weight: float) -> Any:
        """Set each variable to `new + weight * (variable - origin)`.

        The four vectors, of all variables' elements, are two, whose squared distance is returned
        in float64, for each variable its part; `new`; and `origin`.
        """
        sizes = [math.prod(variable.shape) for variable in variables]
        cut = zip(*(tf.split(vector, sizes) for vector in vectors), strict=True)
        squares = []
        for variable, (first, second, new, origin) in zip(variables, cut, strict=True):
            kept = weight * (tf.reshape(variable, [-1]) - origin)
            variable.assign(tf.reshape(new + kept, variable.shape))
            squares.append(tf.reduce_sum(tf.square(tf.cast(first - second, tf.float64))))
        return squares

    def allgather(self, tensor: tf.Tensor, call: Call) -> Rows:
        """Put the members' tensors one after another; also return rows per member (int64)."""

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, call: Call) -> Rows:
        """Send splits[r] rows to member r; also return rows received per member (int64)."""

    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        """Return the tensor of the member number `root`."""

    def reducescatter(self, tensor: tf.Tensor, call: Call, reduction: Reduction) -> tf.Tensor:
        """Reduce and keep this member's part of the rows."""

    def scatter_reduce(
        self, tensors: Tensors, counts: Sequence[int], call: Call, reduction: Reduction
    ) -> tf.Tensor:
        """Reduce the elements of all tensors, one after another; member r keeps the next counts[r].

        The tensors are of one dtype, and `counts` adds up to their elements.
        """
        flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
        begin = sum(counts[: call.group.rank])
        reduced = self.allreduce([flat], call, reduction)[0]
        return reduced[begin : begin + counts[call.group.rank]]

    def quantized_allreduce(
        self, tensors: Tensors, quantization: Quantization, call: Call, reduction: Reduction
    ) -> Quantized:
        """Reduce each tensor over the group, sent with few bits; together they are one message."""
        raise ConfigError(
            "Compression.int8 and int4 need the engine of tfscale. Received: the backend "
            f"{self.name!r}. Use Compression.bf16 or fp16."
        )

    def quantized_scatter(
        self, tensors: Tensors, quantization: Quantization, call: Call, reduction: Reduction
    ) -> Quantized:
        """Reduce each tensor, sent with few bits, and keep this member's parts."""
        # Of a backend without it, this is the same error.
        return self.quantized_allreduce(tensors, quantization, call, reduction)

    def post_gather(
        self,
        pieces: Tensors,
        variables: Sequence[Any],
        layout: SegmentedBucket,
        call: Call,
        changes: Changes | None = None,
    ) -> None:
        """Start gathering the members' pieces into the variables, without waiting.

        With `changes` few bits may be sent of what pieces differ from the variables by: then these
        come near the pieces, with equal bits on all members.

        Readers of a variable must call `await_variables` first, as `optimizer.futures` does. A
        failed gather leaves the values as they are, and readers get its error. `pieces` are those
        that `layout.pieces` returns for this member, `variables` those of `layout.indices`.
        """
        self.gather_and_assign(pieces, variables, layout, call)

    def gather_and_assign(
        self, pieces: Tensors, variables: Sequence[Any], layout: SegmentedBucket, call: Call
    ) -> None:
        """Gather the members' pieces into the variables, and wait for them."""
        flat = [tf.reshape(piece, [-1]) for piece in pieces]
        pieces_here = tf.concat(flat, 0) if flat else tf.zeros([0], layout.dtype)
        gathered, _ = self.allgather(pieces_here, call)
        parts: dict[int, list[tf.Tensor]] = {index: [] for index in layout.indices}
        begin = 0
        for rank in range(call.group.size):
            for piece in layout.pieces(rank):
                parts[piece.variable].append(gathered[begin : begin + piece.count])
                begin += piece.count
        raw = [raw_variable(v) for v in variables]
        # A pending gather would overwrite these values later.
        self.await_variables([v.handle for v in raw], is_write=True)
        for index, shape, variable in zip(layout.indices, layout.shapes, raw, strict=True):
            if math.prod(shape) > 0:
                variable.assign(tf.reshape(tf.concat(parts[index], 0), shape))

    def await_variables(self, handles: Sequence[tf.Tensor], is_write: bool = False) -> None:
        """Wait until nothing posted is pending for variables with these handles; from any thread.

        Raises the OpError of the last exchange, if it failed or was given up. With `is_write` the
        variables are overwritten next, so the error is dropped.
        """
        return

    def drain(self) -> None:
        """Wait until no gather is pending on this process.

        Does not raise the error of a gather that failed: a read of its variable does.
        """
        return

    def add_group(self, ranks: Sequence[int]) -> int:
        """Register the ranks of a process set, and return its id. Collective of all ranks."""

    def remove_group(self, group: int) -> None:
        """Free what a group holds, if no traced function uses it."""

    def mark(self, kind: MarkKind) -> None:
        """Notify the other ranks that this one takes part in no further step for now."""
        return

    def num_given_up(self) -> int:
        """Return the number of collectives that ended because another rank stopped."""
        return 0

    def start_incarnation(self, number: int) -> None:
        """Separate later collectives from those left of a step that was given up."""
        return

    def clock_ns(self) -> int:
        """Return the time, in nanoseconds, of the clock that events are measured with."""
        return time.monotonic_ns()

    def event_array(self) -> np.ndarray:
        """Return the collectives and stamps that ended since the last call, as `Event` records."""
        return np.zeros(0)

    def traffic(self) -> Traffic:
        """The counters of this rank, if TFSCALE_METRICS is set; from any thread."""
        return Traffic()

    def stamp(self, handles: Sequence[tf.Tensor], plan: int, slot: int) -> None:
        """Record, each time the function runs, the time when it has updated the variables.

        `handles` are those of the variables, `plan` is a plan of the function, `slot` is negative.
        """
        return

    def slot_name(self, plan: int, slot: int) -> str:
        """Return the label of the collective that an event is about."""
        return ""

    def graph_of(self, plan: int) -> tf.Graph | None:
        """Return the function graph of a plan, if it is still in use."""
        return None

    def abort(self, code: int) -> None:
        """End all processes of the job. Does not return."""

    def fail(self, why: str) -> None:
        """Notify the others, if possible, that this rank takes part in no further collective."""
        return

    def close(self) -> bool:
        """Leave the job; return whether all ranks left together, none still needing this one.

        The engine waits for all ranks, unless communication has failed, and raises ExchangeError
        if a rank does not leave and shows no activity.
        """


class SingleBackend(Backend):
    """A job with one rank, without thread or MPI; results are the inputs, scaled if requested."""

    name = "single"
    has_marks = True
    rank = local_rank = cross_rank = 0
    size = local_size = cross_size = 1

    def __init__(self) -> None:
        self._n_groups = 1

    def allreduce(self, tensors: Tensors, call: Call, reduction: Reduction) -> list[tf.Tensor]:
        factor = reduction.prescale * reduction.postscale
        if factor == 1.0:
            return [tf.identity(t) for t in tensors]
        return [tf.cast(tf.cast(t, tf.float64) * factor, t.dtype) for t in tensors]

    def allgather(self, tensor: tf.Tensor, call: Call) -> Rows:
        return tf.identity(tensor), tf.shape(tensor, tf.int64)[:1]

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, call: Call) -> Rows:
        return tf.identity(tensor), tf.identity(splits)

    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        return tf.identity(tensor)

    def reducescatter(self, tensor: tf.Tensor, call: Call, reduction: Reduction) -> tf.Tensor:
        return self.allreduce([tensor], call, reduction)[0]

    def add_group(self, ranks: Sequence[int]) -> int:
        self._n_groups += 1
        return self._n_groups - 1

    def remove_group(self, group: int) -> None:
        """Nothing is held."""

    def abort(self, code: int) -> None:
        sys.exit(code)

    def close(self) -> bool:
        return True
