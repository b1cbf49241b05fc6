"""Shares of global batches: the rows that this rank computes within a traced or eager step.

With `tfscale.distribute`, and where batches of a dataset grow, every rank reads whole global
batches, as one process would, and its step cuts out the rank's own rows, unless the data has made
these alone (`RowsOfBatch`). What averages over the rows of a batch (losses, gradients, metrics of
scalars) needs the share's weight, because the shares of a batch may differ by one row.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.config import ConfigError, ExchangeError, PlanError
from tfscale.internals.trace import text_with_place


@dataclass(frozen=True)
class Share:
    """This rank's rows of one global batch: integers, or tensors where the length is not static.

    A rank without rows computes row 0 of the batch, as layers and losses need a row. It counts
    nowhere: not in gradients, metrics, statistics, sums over ranks and predictions.

    Attributes:
        start: First row.
        rows: Number of rows that count, 0 or more.
        total: Rows of the global batch.
        computed: Number of rows that this rank computes, 1 or more.
        others: Numbers of rows that this rank has of parts with another number of rows.
    """

    start: Any
    rows: Any
    total: Any
    computed: Any
    others: tuple[Any, ...] = ()

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have equally many rows."""
        return isinstance(self.total, int) and self.total % runtime.size() == 0

    @property
    def may_be_empty(self) -> bool:
        """Whether this rank has no rows, or that is known only when the step runs."""
        return not (isinstance(self.rows, int) and self.rows > 0)

    def counted(self, rows: tf.Tensor) -> tf.Tensor:
        """Return rows that this rank has computed, or none if they do not count."""
        return rows[: tf.where(self.rows > 0, tf.shape(rows)[0], 0)] if self.may_be_empty else rows

    def weight(self, dtype: Any) -> tf.Tensor:
        """Return rows / (total / size), the weight of this rank's mean in the mean over ranks.

        In local SGD, too: the mean over a group's ranks is then that group's part of the batch's
        mean times the groups, and each sample counts alike in an average.
        """
        return tf.cast(self.rows, dtype) * runtime.size() / tf.cast(self.total, dtype)


class RowsOfBatch(NamedTuple):
    """The rows of a global batch that this rank computes, of data that made only these.

    Attributes:
        rows: The parts of the batch, as `cut` returns them.
        digest: An int64 that differs for other batches, of all rows before they were mapped.
        places: A tensor of shape [rows of the global batch, 0]: that number is static if it is so
            in the data.
    """

    rows: Any
    digest: tf.Tensor
    places: tf.Tensor


_are_used = False


def use(are_used: bool) -> None:
    """Set whether all ranks read the same global batches, and all steps cut out shares."""
    global _are_used
    _are_used = are_used


def are_used() -> bool:
    """Return whether all steps are given the same batches on all ranks, on purpose."""
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


_entered: list[Share | None] = []  # of the steps being traced or run, innermost last
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
    """Return the weight of this rank's rows in the mean over ranks of the last shared batch."""
    return 1.0 if _last_weight is None else float(_last_weight)


def current() -> Share | None:
    """Return the share of the step being traced or run; None outside of steps."""
    return _entered[-1] if _entered else None


def take_rider() -> Rider | None:
    """Return the rider of the step being traced or run, once; None if it has none."""
    rider = _riders[-1] if _riders else None
    _riders[-1:] = [None] * len(_riders[-1:])
    return rider


@contextlib.contextmanager
def entering(share: Share | None, rider: Rider | None = None) -> Iterator[None]:
    """Make a share the current one within a block, a step of the user's; None leaves the step.

    The first sum of the step takes the rider with it.

    Raises:
        ConfigError: The step fails, perhaps because it computes a part of the batch.
    """
    _entered.append(share)
    _riders.append(rider)
    try:
        yield
    except (ConfigError, ExchangeError, PlanError):
        raise
    except (ValueError, IndexError, tf.errors.InvalidArgumentError) as error:
        if share is None:
            raise
        raise ConfigError(explanation(error, share)) from error
    finally:
        _entered.pop()
        _riders.pop()


def explanation(error: Exception, share: Share | None = None) -> str:
    """Return the text for an error in a step that was given a part of the batch."""
    _, is_unequal, numbers = str(error).partition(_UNEQUAL)
    if is_unequal:
        return _unequal(*re.findall(r"\[(\d+)\]", numbers.partition("\n")[0]))
    rows = "a part of the rows"
    if share is not None and isinstance(share.total, int):
        rows = f"{share.rows} of {share.total} rows"
    return (
        f"rank {runtime.rank()} failed in a step on its rows of the batch, {rows}. "
        f"Received: {text_with_place(error)}. If the step works in one process, take the number "
        "of rows from the batch, as tf.shape(x)[0], in place of a constant, and let the first "
        "axis of all parts of a batch be samples: see 'An unchanged script' in the documentation."
    )


def share_of(batch: Any) -> Share | None:
    """Return this rank's share of a global batch; None for a batch without rows.

    The first tensor with rows tells their number. Earlier ranks have one row more if the number of
    ranks does not divide it; with fewer rows than ranks the last ranks have none. Parts with other
    numbers of rows are cut by these numbers, of which each must be a multiple of the ranks.
    """
    parts = batch.places if isinstance(batch, RowsOfBatch) else batch
    with_rows = [leaf for leaf in keras.tree.flatten(parts) if _has_rows(leaf)]
    if not with_rows:
        return None
    first = with_rows[0]
    total = first.shape[0]
    total = tf.shape(first)[0] if total is None else int(total)
    n_ranks, rank = runtime.size(), runtime.rank()
    share, longer = total // n_ranks, total % n_ranks
    is_static = isinstance(total, int)
    lower, higher = (min, max) if is_static else (tf.minimum, tf.maximum)
    more = int(rank < longer) if is_static else tf.cast(rank < longer, tf.int32)
    rows = share + more
    # 0 if there are no rows: rank * share is 0 then, and `longer` the number of all.
    start = (rank * share + lower(rank, longer)) * lower(rows, 1)
    if is_static:
        lengths = {leaf.shape[0] for leaf in with_rows if leaf.shape[0] is not None}
        others = sorted(n for n in lengths if n != total)
        if others and any(n % n_ranks for n in (total, *others)):
            raise ConfigError(_unequal(total, *others))
        of_rank = tuple(n // n_ranks for n in others)
    else:
        further = [leaf for leaf in with_rows[1:] if isinstance(leaf, tf.Tensor)]
        of_rank = tuple(tf.shape(leaf)[0] // n_ranks for leaf in further)
    return Share(start, rows, total, higher(rows, 1), of_rank)


def cut(batch: Any, share: Share) -> Any:
    """Return the rows that this rank computes of all tensors of a batch; others are unchanged."""
    if isinstance(batch, RowsOfBatch):
        return batch.rows

    def rows_of(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        start, rows = _range_of(leaf, share)
        if isinstance(leaf, tf.SparseTensor):
            begin = [start] + [0] * (leaf.shape.rank - 1)
            size = tf.concat([[rows], tf.shape(leaf, tf.int32)[1:]], 0)
            return tf.sparse.slice(leaf, begin, tf.cast(size, tf.int64))
        return leaf[start : start + rows]

    return keras.tree.map_structure(rows_of, batch)


def _range_of(leaf: Any, share: Share) -> tuple[Any, Any]:
    """Return this rank's first row of a tensor, and the number of rows that it computes."""
    n_ranks, rank, length = runtime.size(), runtime.rank(), leaf.shape[0]
    if length is None and not isinstance(leaf, tf.Tensor):
        return share.start, share.computed
    if isinstance(share.total, int) and length in (None, share.total):
        return share.start, share.computed
    if isinstance(share.total, int):
        return rank * (length // n_ranks), length // n_ranks
    length = tf.shape(leaf)[0]
    is_same, per_rank = length == share.total, length // n_ranks
    are_even = (length % n_ranks == 0) & (share.total % n_ranks == 0)
    check = tf.debugging.Assert(is_same | are_even, [_UNEQUAL, share.total, length])
    with tf.control_dependencies([] if check is None else [check]):
        start = tf.where(is_same, share.start, rank * per_rank)
    return start, tf.where(is_same, share.computed, per_rank)


_UNEQUAL = "rows must be equal in all parts of a batch, or numbers that the ranks divide."


def _unequal(*numbers: Any) -> str:
    return (
        f"{_UNEQUAL} Received: {', '.join(map(str, numbers))} rows for {runtime.size()} ranks. Use "
        "batch sizes that are multiples of the number of ranks, with drop_remainder=True, or as "
        "many rows in all parts."
    )


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
        of_rank = (share.computed, *share.others)
        return share.is_even and all(length % rows != 0 for rows in of_rank)
    return True


def _has_rows(leaf: Any) -> bool:
    return getattr(leaf, "shape", None) is not None and len(leaf.shape) > 0
