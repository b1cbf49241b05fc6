"""Tables of which each rank holds some rows: which rank has a row, lookups, and whole tables.

A table of N rows has N *positions*, and each rank holds the rows at consecutive positions. By
default position p of id i is i * f mod N, with f near 0.618 N and prime to N: equally many of the
smallest ids, which are often the most frequent ones, then lie on each rank, and so do ids with
gaps between them. The order of positions does not depend on the number of ranks.

A lookup sends each id once to the rank that holds its row, and receives the row. Back-propagation
adds up the gradients of an id on each rank, and sends the sums back the same way. No rank ever has
the gradient of another rank's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group
from tfscale.comm.meeting import Meeting
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange import batch_shares as shares
from tfscale.internals.keras import raw_variable
from tfscale.plan.segments import row_cuts

SLICE_BYTES = 16 << 20  # of rows that are read, sent or written together
_GOLDEN = (math.sqrt(5) - 1) / 2
# States of a rank in a lookup: the first number that it sends to each other rank, modulo 4.
_JOINS, _LOOKS_UP, _FAILS = 0, 1, 2
_MOST_ID = 1 << 60  # ids beyond it are named as it


@dataclass(frozen=True)
class Table:
    """The rows of a table, and the ranks that hold them.

    Attributes:
        n_rows: Number of rows, the same on all ranks.
        width: Number of values in a row.
        process_set: The ranks that share the rows.
        is_spread: Whether neighbouring ids lie on different ranks.
    """

    n_rows: int
    width: int
    process_set: ProcessSet = global_process_set
    is_spread: bool = True

    @property
    def group(self) -> Group:
        """The ranks that share the rows."""
        return self.process_set.group()

    @cached_property
    def factor(self) -> int:
        """The factor from ids to positions, modulo the number of rows."""
        if not self.is_spread:
            return 1
        middle = round(self.n_rows * _GOLDEN)
        near = (middle + sign * step for step in range(self.n_rows) for sign in (1, -1))
        return next((f for f in near if f > 0 and math.gcd(f, self.n_rows) == 1), 1)

    @property
    def cuts(self) -> list[int]:
        """The first position of each rank, then the number of rows."""
        return row_cuts(self.n_rows, self.group.size)

    @property
    def own(self) -> tuple[int, int]:
        """The first position of this rank, and the end of its positions."""
        group = self.group
        begin, end = row_cuts(self.n_rows, group.size)[max(group.rank, 0) :][:2]
        return begin, end

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """The positions of ids, int64."""
        return np.asarray(ids, np.int64) * self.factor % self.n_rows

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """The ids at positions, int64."""
        inverse = pow(self.factor, -1, self.n_rows) if self.n_rows > 1 else 0
        return np.asarray(positions, np.int64) * inverse % self.n_rows

    def slices(self, itemsize: int, start: int = 0, stop: int | None = None) -> Iterator[range]:
        """Ranges of at most `SLICE_BYTES`, from `start` to `stop` or the number of rows."""
        stop = self.n_rows if stop is None else stop
        length = max(1, SLICE_BYTES // max(1, self.width * itemsize))
        for begin in range(start, stop, length):
            yield range(begin, min(begin + length, stop))

    def rows_of(self, ids: range, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a range of ids, the places of those that a rank holds, and its rows of them."""
        positions, cuts = self.positions(np.arange(ids.start, ids.stop)), self.cuts
        places = np.flatnonzero((cuts[rank] <= positions) & (positions < cuts[rank + 1]))
        return places, positions[places] - cuts[rank]


class TableRows(keras.Variable):
    """The rows of a table that this rank holds, in the order of their positions.

    Attributes:
        table: The whole table.
        lazy: Whether an update changes looked-up rows only.
        keeps_repeats: Whether gradients of one id are sent apart, see `follow`.
        n_loads: How often rows were loaded on this rank.
    """

    def __init__(self, table: Table, initialize: Callable[..., Any], lazy: bool, **options: Any):
        """Create the rows by `initialize(shape, dtype)`; options are those of keras.Variable."""
        begin, end = table.own
        self.table, self.lazy, self.keeps_repeats, self.n_loads = table, lazy, False, 0
        super().__init__(initialize, shape=(end - begin, table.width), **options)
        shared = f"the rows of {self.path}"
        self._meeting = Meeting(table.group, shared) if table.group.size > 1 else None

    @property
    def is_shared(self) -> bool:
        """True if other ranks have rows of the table, so that none can train on its own."""
        return self.table.group.size > 1

    @property
    def held(self) -> tuple[int, int]:
        """The range of the flat table, in the order of positions, that this rank holds."""
        begin, end = self.table.own
        return begin * self.table.width, end * self.table.width

    def _serialize_to_tensors(self) -> Any:
        if self.table.group.size == 1:
            return super()._serialize_to_tensors()
        raise ConfigError(
            "tf.train.Checkpoint cannot save rows that ranks share. Received: "
            f"{self.path}. Use tfscale.callbacks.Checkpoint, model.save or model.save_weights."
        )

    def meet(self, what: str) -> None:
        """Wait for all ranks; `what` names the operation in the error. Collective."""
        if self._meeting is not None:
            self._meeting.wait(what)

    def follow(self, keeps_repeats: bool) -> bool:
        """Let gradients of one id be sent apart, or not; return whether to trace again."""
        before, self.keeps_repeats = self.keeps_repeats, keeps_repeats
        return before is not keeps_repeats

    def load(self, source: Any) -> None:
        """Take this rank's rows of a whole table, which is read in slices of consecutive ids."""
        raw = raw_variable(self)
        for rows, values in self._own_parts(source):
            write_rows(raw, tf.constant(rows), tf.cast(values, raw.dtype))
        self.n_loads += 1

    def take(self, held: tuple[int, int], read: Callable[[int, int], np.ndarray]) -> None:
        """Take the rows of this rank that another rank held, in slices.

        Args:
            held: The range of the flat table that the other rank held.
            read: Returns elements of this range, from one to another.
        """
        width, raw, (first, last) = self.table.width, raw_variable(self), self.held
        begin, end = max(first, held[0]) // width, min(last, held[1]) // width
        for rows in self.table.slices(raw.dtype.size, begin, end):
            flat = read(rows.start * width - held[0], rows.stop * width - held[0])
            row_numbers = tf.range(rows.start - first // width, rows.stop - first // width)
            write_rows(raw, row_numbers, tf.cast(np.reshape(flat, (len(rows), width)), raw.dtype))
        self.n_loads += 1

    def part_of(self, source: Any, dtype: Any) -> np.ndarray:
        """This rank's rows of a whole table, or of a slot of an optimizer for it."""
        result = np.empty(tuple(self.shape), dtype)
        for rows, values in self._own_parts(source):
            result[rows] = values
        return result

    def _own_parts(self, source: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids in self.table.slices(tf.as_dtype(self.dtype).size):
            places, rows = self.table.rows_of(ids, max(self.table.group.rank, 0))
            if len(places):
                yield rows, np.asarray(source[ids.start : ids.stop])[places]


def table_of(variable: Any) -> Table | None:
    """The table of which a variable is this rank's rows; None for other variables."""
    return variable.table if isinstance(variable, TableRows) else None


def read_rows(raw: Any, rows: Any) -> tf.Tensor:
    """Some rows of a TensorFlow variable, of which nothing else is read."""
    return raw.sparse_read(rows)


def write_rows(raw: Any, rows: Any, values: Any) -> None:
    """Assign some rows of a TensorFlow variable in place."""
    raw.scatter_update(tf.IndexedSlices(values, rows))


def gathered(
    table: Table, variable: Any, ids: range, receivers: Sequence[int] | None = None
) -> np.ndarray:
    """The rows of some ids, from the ranks that hold them. Collective, eager.

    Args:
        table: The table.
        variable: This rank's rows of it, or a slot of an optimizer for them.
        ids: Consecutive ids, the same on all ranks.
        receivers: The members that receive the rows; None for all.

    Returns:
        Rows in the order of ids; none on members that receive nothing.
    """
    raw, group = raw_variable(variable), table.group
    places, rows = table.rows_of(ids, max(group.rank, 0))
    own_rows = read_rows(raw, tf.constant(rows))
    if group.size == 1:
        return np.asarray(own_rows)
    receivers = range(group.size) if receivers is None else receivers
    result = np.empty((len(ids) if group.rank in receivers else 0, table.width), raw.dtype.name)
    for receiver in receivers:
        splits = [len(places) if rank == receiver else 0 for rank in range(group.size)]
        call = Call(group, "rows of a table")
        received, counts = runtime.backend().alltoall(own_rows, tf.constant(splits, tf.int64), call)
        ends = np.cumsum(counts.numpy())
        for rank in range(group.size) if group.rank == receiver else ():
            there, _ = table.rows_of(ids, rank)
            result[there] = received[ends[rank] - len(there) : ends[rank]].numpy()
    return result


def whole(table: Table, variable: Any, receivers: Sequence[int] | None = None) -> np.ndarray | None:
    """The whole table, or slot, in the order of ids. Collective, eager; it is sent in slices.

    Returns:
        An array on the members `receivers`, or on all for None; None elsewhere.
    """
    raw, group = raw_variable(variable), table.group
    is_here = receivers is None or group.size == 1 or group.rank in receivers
    result = np.empty((table.n_rows, table.width), raw.dtype.name) if is_here else None
    for ids in table.slices(raw.dtype.size):
        rows = gathered(table, variable, ids, receivers)
        if result is not None:
            result[ids.start : ids.stop] = rows
    return result


# Lookups.


@dataclass(frozen=True)
class Calls:
    """The collectives of a table: their names, and the handle that orders them.

    Attributes:
        name: The table's name in logs and errors.
        order: Handle of a variable of which TensorFlow sees every lookup as a use: lookups of a
            table begin in the order of tracing. Those of different tables do not wait for each
            other.
        kind: Separates the messages of a kind of lookup from those of others.
    """

    name: str
    order: Any
    kind: str = ""

    def call(self, group: Group, what: str) -> Call:
        """The call of one collective."""
        return Call(group, f"{self.name} {what}", (self.order,), f"{self.kind}{what} of tables")


# Without this, AutoGraph would convert the code in every traced function.
@tf.autograph.experimental.do_not_convert
def look_up(
    rows: TableRows, ids: tf.Tensor, calls: Calls, state: Any = _LOOKS_UP
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of ids, from all ranks. Collective in a step, differentiable.

    Args:
        rows: This rank's rows.
        ids: Integers of shape [n]; n may differ between ranks.
        calls: The names of the collectives.
        state: 1 if this rank looks up, 0 if it only answers the others.

    Returns:
        Rows of shape [n, width] in the dtype of the table, and whether any rank looks up.

    Raises:
        ExchangeError: On all ranks, if an id of any rank is no row; of TensorFlow in a traced
            function. Nothing can be exchanged afterwards.
    """
    table, raw = rows.table, raw_variable(rows)
    ids = tf.cast(ids, tf.int64)
    is_row = (ids >= 0) & (ids < table.n_rows)
    bad = tf.clip_by_value(tf.boolean_mask(ids, ~is_row)[:1], -_MOST_ID, _MOST_ID)
    positions = tf.where(is_row, ids, 0)
    if table.factor != 1:
        positions = tf.math.floormod(positions * table.factor, table.n_rows)
    group = table.group
    if group.size == 1:
        check = _require_rows(rows, calls.name, bad, tf.zeros_like(bad))
        with tf.control_dependencies(check):
            return tf.gather(raw, positions), tf.constant(True)
    header = tf.concat([bad * 4 + _FAILS, [tf.cast(state, tf.int64)]], 0)[0]
    if rows.keeps_repeats:
        distinct, places = positions, tf.range(tf.size(positions))
    else:
        distinct, places = tf.unique(positions)
    order = tf.argsort(distinct)
    distinct = tf.gather(distinct, order)
    # The ids that each rank holds, after a header for each rank.
    cuts = tf.constant(table.cuts, tf.int64)
    bounds = tf.searchsorted(distinct, cuts)
    n_asked = tf.cast(bounds[1:] - bounds[:-1], tf.int64)
    slots = tf.concat(
        [
            tf.range(tf.size(distinct)) + tf.searchsorted(cuts[:-1], distinct, side="right"),
            bounds[:-1] + tf.range(group.size),
        ],
        0,
    )
    message = tf.concat([distinct, tf.fill([group.size], header)], 0)
    message = tf.scatter_nd(slots[:, tf.newaxis], message, tf.shape(slots))
    backend = runtime.backend()
    received, counts = backend.alltoall(message, n_asked + 1, calls.call(group, "ids"))
    first = tf.cumsum(counts, exclusive=True)
    headers = tf.gather(received, first)
    is_id = tf.tensor_scatter_nd_update(
        tf.ones(tf.shape(received), tf.bool), first[:, tf.newaxis], tf.zeros([group.size], tf.bool)
    )
    states = tf.math.floormod(headers, 4)
    fails = states == _FAILS
    ranks = tf.boolean_mask(tf.constant(group.ranks, tf.int64), fails)[:1]
    check = _require_rows(rows, calls.name, tf.boolean_mask(headers, fails)[:1] // 4, ranks)
    with tf.control_dependencies(check):
        wanted = tf.boolean_mask(received, is_id) - table.own[0]
    answered = counts - 1

    @tf.custom_gradient
    def send(own: tf.Tensor) -> Any:
        sent, _ = backend.alltoall(own, answered, calls.call(group, "rows"))

        def backward(gradient: Any) -> tf.Tensor:
            gradient = shares.weighted(tf.convert_to_tensor(gradient))
            call = calls.call(group, "gradients")
            sums, _ = backend.alltoall(gradient, n_asked, call)
            return tf.ensure_shape(sums, [None, table.width])

        return tf.ensure_shape(sent, [None, table.width]), backward

    of_distinct = send(tf.gather(raw, wanted))
    at = tf.gather(tf.math.invert_permutation(order), places)
    return tf.gather(of_distinct, at), tf.reduce_any(states == _LOOKS_UP)


_REMEDY = "Raise input_dim, or map unknown ids to a row of their own."


def _require_rows(rows: TableRows, name: str, bad: tf.Tensor, ranks: tf.Tensor) -> list[Any]:
    """The checks that ids are rows, which a traced function must wait for; an error otherwise."""
    text = f"ids must be 0 to {rows.table.n_rows - 1} in the table of {name}. Received: id "

    def refuse(bad: tf.Tensor, ranks: tf.Tensor) -> np.ndarray:
        said = f"{text}{int(bad[0])} on rank {int(ranks[0])}. {_REMEDY}"
        # TensorFlow cancels what else this rank would send in the step, and others wait for it.
        if rows.table.group.size > 1:
            runtime.backend().fail(said)
        raise ExchangeError(f"TFSCALE_FAILED: {said}")

    def fail() -> tf.Tensor:
        return tf.py_function(refuse, [bad, ranks], tf.int32)

    checked = tf.cond(tf.size(bad) > 0, fail, lambda: tf.constant(0))
    return [] if tf.executing_eagerly() else [checked]
