"""Shares of global batches: the rows that this rank computes within a traced or eager step.

With `tfscale.distribute` every rank reads whole global batches, as one process would, and its step
cuts out the rank's own rows. What averages over the rows of a batch (losses, gradients, metrics of
scalars) needs the share's weight, because the shares of a batch may differ by one row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime


@dataclass(frozen=True)
class Share:
    """This rank's rows of one global batch: integers, or tensors where the length is not static.

    Attributes:
        start: First row.
        rows: Number of rows, 0 or more.
        total: Rows of the global batch.
    """

    start: Any
    rows: Any
    total: Any

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have equally many rows."""
        return isinstance(self.total, int) and self.total % runtime.size() == 0

    def weight(self, dtype: Any) -> tf.Tensor:
        """Return rows / (total / size), the weight of this rank's mean in the mean over ranks."""
        return tf.cast(self.rows, dtype) * runtime.size() / tf.cast(self.total, dtype)

    def cut(self, rows: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of rows, one or several for each row of the global batch."""
        length = rows.shape[0]
        if length is None:
            length = tf.shape(rows)[0]
        per_row = length // self.total
        return rows[self.start * per_row : (self.start + self.rows) * per_row]


_are_used = False


def use(are_used: bool) -> None:
    """Set whether all ranks read the same global batches, and their steps cut out shares."""
    global _are_used
    _are_used = are_used


def are_used() -> bool:
    """Return whether the ranks are given the same batches on purpose."""
    return _are_used


@dataclass(frozen=True)
class Rider:
    """Numbers that are sent with the first sum of a step, to find ranks that differ in them.

    Attributes:
        signs: A vector of 1 and -1.
        refuse: Called in a branch that all ranks take if any signs differ; raises in each run.
            Collective.
    """

    signs: tf.Tensor
    refuse: Callable[[], tf.Tensor]

    def check(self, total: tf.Tensor, n_ranks: int, factor: float) -> list[tf.Tensor]:
        """Compare the sum of the signs of all ranks, times `factor`; all ranks have the same sum.

        Returns what a traced step must wait for.
        """
        # Signs that differ add up to n_ranks - 2 or less, and others to n_ranks.
        differs = tf.reduce_min(tf.abs(tf.cast(total, tf.float64))) < (n_ranks - 1) * factor
        if not tf.executing_eagerly():
            return [tf.cond(differs, self.refuse, lambda: tf.constant(0))]
        if bool(differs):
            self.refuse()
        return []


_entered: list[Share] = []  # of the steps being traced or run, innermost last
_riders: list[Rider | None] = []  # of the same steps, until they are sent
_last_weight: tf.Variable | None = None  # of the batch of the last step that ran


def note_weight(share: Share) -> None:
    """Record the weight of the batch each time the step that is being traced runs."""
    global _last_weight
    if _last_weight is None:
        with tf.init_scope():
            _last_weight = tf.Variable(1.0, trainable=False, dtype=tf.float64)
    _last_weight.assign(share.weight(tf.float64))


def weight_of_last_batch() -> float:
    """Return the weight of this rank's rows in the mean over ranks of the last batch."""
    return 1.0 if _last_weight is None or not _are_used else float(_last_weight)


def current() -> Share | None:
    """Return the share of the step being traced or run; None outside of steps."""
    return _entered[-1] if _entered else None


def take_rider() -> Rider | None:
    """Return the rider of the step being traced or run, once; None if it has none."""
    rider = _riders[-1] if _riders else None
    _riders[-1:] = [None] * len(_riders[-1:])
    return rider


@contextlib.contextmanager
def entering(share: Share, rider: Rider | None = None) -> Iterator[None]:
    """Make a share the current one within a block, whose first sum takes the rider with it."""
    _entered.append(share)
    _riders.append(rider)
    try:
        yield
    finally:
        _entered.pop()
        _riders.pop()


def share_of(batch: Any) -> Share | None:
    """Return this rank's share of a global batch; None for a batch without rows.

    The first tensor with rows tells their number. Earlier ranks have one row more if the number of
    ranks does not divide it; with fewer rows than ranks the last ranks have none.
    """
    first = next((leaf for leaf in keras.tree.flatten(batch) if _has_rows(leaf)), None)
    if first is None:
        return None
    total = first.shape[0]
    total = tf.shape(first)[0] if total is None else int(total)
    n_ranks, rank = runtime.size(), runtime.rank()
    share, longer = total // n_ranks, total % n_ranks
    lower = min if isinstance(total, int) else tf.minimum
    more = int(rank < longer) if isinstance(total, int) else tf.cast(rank < longer, tf.int32)
    return Share(rank * share + lower(rank, longer), share + more, total)


def cut(batch: Any, share: Share) -> Any:
    """Return this rank's rows of all tensors of a batch; other values are unchanged."""

    def rows_of(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            begin = [share.start] + [0] * (leaf.shape.rank - 1)
            size = tf.concat([[share.rows], tf.shape(leaf, tf.int32)[1:]], 0)
            return tf.sparse.slice(leaf, begin, tf.cast(size, tf.int64))
        if not isinstance(share.total, int) and isinstance(leaf, tf.Tensor):
            length = tf.debugging.assert_equal(tf.shape(leaf)[0], share.total, _UNEQUAL)
            with tf.control_dependencies([] if length is None else [length]):
                leaf = tf.identity(leaf)
        elif leaf.shape[0] not in (None, share.total):
            raise ValueError(f"{_UNEQUAL} Received: {leaf.shape[0]} and {share.total} rows.")
        return leaf[share.start : share.start + share.rows]

    return keras.tree.map_structure(rows_of, batch)


_UNEQUAL = "All tensors of a batch must have as many rows, which the ranks share."


def weighted(gradient: Any) -> Any:
    """Return a gradient times the weight of the current share, where that may differ from 1."""
    share = current()
    if share is None or share.is_even or gradient is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = weighted(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    weight = share.weight(gradient.dtype)
    # A rank without rows may have a mean of nothing, which is NaN. Most steps are even.
    return tf.cond(weight == 1, lambda: gradient, lambda: tf.math.multiply_no_nan(gradient, weight))


def is_common(values: tf.Tensor) -> bool:
    """Return whether the rows of a tensor belong to no single samples of the current batch.

    Their number is then static, unlike that of the samples, or no multiple of it. A number that is
    a multiple by chance counts as rows of samples.
    """
    share, length = current(), values.shape[0]
    if share is None or length is None:
        return False
    if isinstance(share.total, int):
        return share.is_even and length % share.rows != 0
    return True


def _has_rows(leaf: Any) -> bool:
    return getattr(leaf, "shape", None) is not None and len(leaf.shape) > 0
