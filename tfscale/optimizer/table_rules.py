"""Keras's update rules on this rank's rows of tables: in slices, or of looked-up rows only.

Keras's rules are dense: Adam changes rows that were not looked up, too. So a rule runs over all of
this rank's rows, as in one process, but over a slice of them at a time: temporary tensors of Keras
are as large as what it updates. Where a row without a gradient stays as it is (SGD without
momentum, Adagrad), and with `lazy=True`, the rule runs over looked-up rows only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.exchange.tables import TableRows, read_rows, write_rows
from tfscale.internals.keras import raw_variable
from tfscale.internals.optimizers import (
    apply_function,
    decay_function,
    decays,
    index_of,
    replaced,
    rows_in_place_of,
    slot_lists,
    trained_by,
)

# Bytes of a table's rows that are updated together. Keras's rules hold up to 16 such tensors.
SLICE_BYTES = 4 << 20


def tables_of(variables: Sequence[Any]) -> list[TableRows]:
    """The rows of tables among some variables."""
    return [v for v in variables if isinstance(v, TableRows)]


def refuse_unfit(
    rule: Any,
    variables: Sequence[Any],
    elementwise: Sequence[type],
    trains_apart: bool,
    ranks: Any,
) -> None:
    """Raise a ConfigError if an optimizer cannot train the rows of tables among some variables.

    Args:
        rule: The optimizer that holds the update rule.
        variables: That it trains, or will.
        elementwise: The classes of rules that update each value by itself.
        trains_apart: Whether groups of ranks may hold different weights.
        ranks: The process set of the optimizer.
    """
    for rows in tables_of(variables):
        what, remedy = "", "Use keras.layers.Embedding."
        if type(rule) not in elementwise:
            what = f"{type(rule).__name__}, which needs whole tables"
            remedy = "Use SGD, Adagrad, Adam or another rule that updates each value by itself."
        elif rule.use_ema:
            what, remedy = "use_ema=True", "Leave use_ema out, or use keras.layers.Embedding."
        elif trains_apart:
            what, remedy = "exchange=LocalSGD", "Use another exchange."
        elif ranks.group() != rows.table.group:
            what = f"an optimizer of ranks {list(ranks.group().ranks)}"
            remedy = "Give both the same process_set."
        if what:
            raise ConfigError(
                f"optimizer cannot train the rows of {rows.path}, a ShardedEmbedding of ranks "
                f"{list(rows.table.group.ranks)}. Received: {what}. {remedy}"
            )


@contextlib.contextmanager
def on_rows(rule: Any) -> Iterator[None]:
    """Within a block, let an update rule run over the rows of tables as this module says."""
    tables = {id(raw_variable(v)): v for v in tables_of(trained_by(rule))}
    if not tables:
        yield
        return
    update, decay = rule.update_step, _without_tables(rule, tables)
    apply = apply_function(rule)

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        rows = tables.get(id(raw_variable(variable)))
        if rows is None or (_is_small(rows) and not _is_by_row(rule, rows)):
            update(gradient, variable, learning_rate)
        elif rows.shape[0] > 0:  # rules of Keras fail on no rows
            _Update(rule, update, rows, learning_rate).run(gradient)

    def apply_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        # Keras adds gradients of no rows to earlier ones as if they were a bias, which fails.
        adds = bool(rule.gradient_accumulation_steps)
        pairs = zip(gradients, variables, strict=True)
        summands = [
            _Rows(tf.convert_to_tensor(g)) if adds and 0 in v.shape else g for g, v in pairs
        ]
        apply(summands, variables)

    with replaced(
        rule,
        update_step=update_step,
        _apply_weight_decay=decay,
        _backend_apply_gradients=apply_gradients,
    ):
        yield


def _without_tables(rule: Any, tables: dict[int, TableRows]) -> Any:
    """Keras's weight decay for all variables but those whose slices decay with their update."""
    decay = decay_function(rule)

    def apply_weight_decay(variables: Sequence[Any]) -> None:
        rows = [tables.get(id(raw_variable(v))) for v in variables]
        whole = [
            v
            for v, of in zip(variables, rows, strict=True)
            if of is None or (_is_small(of) and not _is_by_row(rule, of))
        ]
        decay(whole)

    return apply_weight_decay


def _is_small(rows: TableRows) -> bool:
    raw = raw_variable(rows)
    return 0 < int(raw.shape[0]) * int(raw.shape[1]) * raw.dtype.size <= SLICE_BYTES


def _is_by_row(rule: Any, rows: TableRows) -> bool:
    """Return whether only looked-up rows are updated."""
    if rows.lazy:
        return True
    if decays(rule, rows):
        return False
    is_plain = type(rule) is keras.optimizers.SGD and not rule.momentum
    return is_plain or type(rule) is keras.optimizers.Adagrad


class _Update:
    """One update of the rows of a table."""

    def __init__(self, rule: Any, update: Any, rows: TableRows, learning_rate: Any) -> None:
        self._rule, self._update, self._rows = rule, update, rows
        self._raw, self._rate = raw_variable(rows), learning_rate
        self._index = index_of(rule, self._raw)
        self._slots = slot_lists(rule, self._index)

    def run(self, gradient: Any) -> None:
        """Update by a gradient: a tensor, or IndexedSlices whose indices may repeat."""
        if not isinstance(gradient, tf.IndexedSlices):
            self._run_slices(lambda at: tf.gather(gradient, at))
            return
        if _is_by_row(self._rule, self._rows):
            indices, places = tf.unique(gradient.indices)
            shape = tf.stack([tf.size(indices, places.dtype), gradient.values.shape[1]])
            self._update_at(indices, tf.IndexedSlices(gradient.values, places, shape))
            return
        order = tf.argsort(gradient.indices, stable=True)
        indices = tf.gather(gradient.indices, order)
        values = tf.gather(gradient.values, order)

        def part(at: tf.Tensor) -> Any:
            ends = tf.searchsorted(indices, tf.stack([at[0], at[-1] + 1]))
            shape = tf.stack([tf.size(at, at.dtype), tf.constant(values.shape[1], at.dtype)])
            inside = slice(ends[0], ends[1])
            return tf.IndexedSlices(values[inside], indices[inside] - at[0], shape)

        self._run_slices(part, indices.dtype)

    def _run_slices(self, part: Any, dtype: Any = tf.int64) -> None:
        n_rows, width = self._raw.shape
        length = max(1, SLICE_BYTES // (width * self._raw.dtype.size))

        def body(begin: tf.Tensor) -> list[tf.Tensor]:
            at = tf.range(begin, tf.minimum(begin + length, n_rows), dtype=dtype)
            self._update_at(at, part(at))
            return [begin + length]

        begin = tf.zeros([], dtype)
        tf.while_loop(lambda b: b < n_rows, body, [begin], parallel_iterations=1)

    def _update_at(self, at: tf.Tensor, gradient: Any) -> None:
        """Let Keras's rule update rows and their slots, by a gradient of these rows."""
        raws = [self._raw, *(raw_variable(slot) for _, _, slot in self._slots)]
        parts = [_Rows(read_rows(raw, at)) for raw in raws]
        if decays(self._rule, self._rows):
            rate = tf.cast(self._rate, parts[0].dtype)
            factor = tf.cast(self._rule.weight_decay, parts[0].dtype)
            parts[0].assign_sub(parts[0].rows * factor * rate)
        slots = [(name, i, part) for (name, i, _), part in zip(self._slots, parts[1:], strict=True)]
        with rows_in_place_of(self._rule, self._index, slots):
            self._update(gradient, parts[0], self._rate)
        for raw, part in zip(raws, parts, strict=True):
            write_rows(raw, at, part.rows)


class _Rows:
    """Some rows of a variable, with the methods that update rules use."""

    def __init__(self, rows: tf.Tensor) -> None:
        self.rows = rows

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the variable."""
        return self.rows.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the rows."""
        return self.rows.shape

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        del name
        return self.rows if dtype is None else tf.cast(self.rows, dtype)

    def __add__(self, other: Any) -> tf.Tensor:
        return self.rows + tf.convert_to_tensor(other)

    def assign(self, value: Any) -> None:
        """Replace the rows."""
        self.rows = tf.convert_to_tensor(value, self.dtype)

    def assign_add(self, value: Any) -> None:
        """Add to the rows."""
        self.rows = self.rows + tf.convert_to_tensor(value, self.dtype)

    def assign_sub(self, value: Any) -> None:
        """Subtract from the rows."""
        self.rows = self.rows - tf.convert_to_tensor(value, self.dtype)

    def scatter_add(self, value: tf.IndexedSlices) -> None:
        """Add to some of the rows."""
        at = value.indices[:, tf.newaxis]
        self.rows = tf.tensor_scatter_nd_add(self.rows, at, value.values)

    def scatter_sub(self, value: tf.IndexedSlices) -> None:
        """Subtract from some of the rows."""
        at = value.indices[:, tf.newaxis]
        self.rows = tf.tensor_scatter_nd_sub(self.rows, at, value.values)

    def scatter_update(self, value: tf.IndexedSlices) -> None:
        """Replace some of the rows."""
        at = value.indices[:, tf.newaxis]
        self.rows = tf.tensor_scatter_nd_update(self.rows, at, value.values)
