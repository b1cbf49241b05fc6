"""Steps on shares of batches, which give the numbers of steps on whole batches.

A model's `train_step`, `test_step` and `predict_step` are given whole batches and cut out this
rank's rows. Within them, and only there,

* losses divide by what all ranks have, where a rank's own rows do not tell (masks, sample weights,
  sums, Dice);
* means of scalars weigh a rank by its rows, and so does the optimizer (`exchange/batch_shares.py`);
* BatchNormalization uses the statistics of the whole batch;
* random numbers are drawn for the whole batch, and each rank takes those of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import collectives
from tfscale.comm.runtime import Sum, global_process_set
from tfscale.config import ConfigError
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.batch_shares import Share
from tfscale.exchange.sync_batch_norm import global_moments
from tfscale.internals.classes import Patches, sums_over_batch, weights_with_mask

Look = Callable[[Any], Any]  # at a whole batch, before its step
_GATHERED = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.int8, tf.uint8)


def patch(patches: Patches, batch_norm: str) -> None:
    """Patch what steps call; without effect outside of steps."""
    patches.wrap_reduction(_reduced_over_ranks)
    patches.wrap_losses(_of_whole_batch)
    patches.wrap_means(_weighted_mean)
    patches.wrap_draws(_drawn_for_all, _dropout_of_all, _categorical_of_all)
    if batch_norm == "global":
        patches.wrap_moments(_moments_of_all)


# The steps of a model.


def on_share(step: Callable[[Any], Any], look: Look) -> Callable[[Any], Any]:
    """Make a training or test step of whole batches one of this rank's rows.

    `look` is called with whole batches first.
    """

    def step_on_share(batch: Any) -> Any:
        rider = look(batch)
        share = shares.share_of(batch)
        if share is None:
            return step(batch)
        shares.note_weight(share)
        with shares.entering(share, rider):
            return step(shares.cut(batch, share))

    return step_on_share


def on_all_rows(step: Callable[[Any], Any], look: Look) -> Callable[[Any], Any]:
    """Make a predict step compute this rank's rows and return those of all ranks, in order."""

    def step_on_all_rows(batch: Any) -> Any:
        look(batch)
        share = shares.share_of(batch)
        if share is None:
            return step(batch)
        with shares.entering(share):
            own = step(shares.cut(batch, share))
        if not all(map(_can_gather, keras.tree.flatten(own))):
            return step(batch)  # every rank computes all
        gather = collectives.allgather
        return keras.tree.map_structure(lambda rows: gather(rows, name="rows of predict"), own)

    return step_on_all_rows


def _can_gather(output: Any) -> bool:
    is_dense = tf.is_tensor(output) and not isinstance(output, tf.RaggedTensor | tf.SparseTensor)
    return is_dense and output.shape.rank != 0 and output.dtype in _GATHERED


# Losses and metrics.


def _reduced_over_ranks(reduce: Any) -> Any:
    def reduce_over_ranks(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = reduce(values, sample_weight, mask, reduction, dtype)
        share = shares.current()
        if share is None or reduction in (None, "none"):
            return loss
        if tuple(loss.shape) == (0,):  # Keras leaves the values of a rank without rows as they are
            loss = tf.reduce_sum(loss)
        # The rank's loss is weighted by rows / (total / size): this is what becomes of a sum.
        share_of_sum = tf.math.divide_no_nan(
            tf.cast(share.total, loss.dtype), tf.cast(share.rows, loss.dtype)
        )
        if reduction == "sum":
            return loss * share_of_sum
        is_weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
        if mask is None and not is_weighted:
            return loss
        weights = weights_with_mask(sample_weight if is_weighted else None, mask, loss.dtype)
        own = tf.stop_gradient(tf.reduce_sum(tf.cast(weights, loss.dtype)))
        every = collectives.allreduce(own, op=Sum, name="divisor of loss")
        return loss * tf.math.divide_no_nan(own, every) * share_of_sum

    return reduce_over_ranks


def _of_whole_batch(call: Any) -> Any:
    """Give losses that divide sums over a batch the rows of all ranks."""

    def call_on_whole_batch(self: Any, y_true: Any, y_pred: Any) -> Any:
        share = shares.current()
        if share is not None and self.fn is keras.losses.circle:
            raise ConfigError(
                "tfscale.distribute computes losses from each rank's rows. Received: Circle, "
                "which compares all samples of a batch. Train without tfscale.distribute, and "
                "gather the rows by tfscale.allgather: see docs/distribute.md."
            )
        if share is None or not sums_over_batch(self):
            return call(self, y_true, y_pred)
        # The gather adds up the ranks' gradients of rows, and the optimizer averages them with the
        # weights of the ranks that hold the rows; those of the ranks that add them count here.
        weight = share.weight(y_pred.dtype)
        own = _with_gradient(y_pred, lambda gradient: tf.math.divide_no_nan(gradient, weight))
        every = collectives.allgather(own, gradient="adjoint", name="predictions of loss")
        targets = collectives.allgather(y_true, gradient="adjoint", name="targets of loss")
        return _with_gradient(call(self, targets, every), lambda gradient: gradient * weight)

    return call_on_whole_batch


def _with_gradient(values: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Return values whose gradient is changed on its way back."""
    return tf.custom_gradient(lambda same: (tf.identity(same), change))(values)


def _weighted_mean(update_state: Any) -> Any:
    def update(self: Any, values: Any, sample_weight: Any = None) -> Any:
        share = shares.current()
        is_scalar = len(getattr(values, "shape", ())) == 0 and not isinstance(values, list | tuple)
        if share is not None and not share.is_even and is_scalar:
            values = tf.cast(values, self.dtype)
            values = tf.where(share.rows > 0, values, tf.zeros_like(values))  # of no rows: NaN
            if sample_weight is None:
                sample_weight = share.weight(values.dtype)
        return update_state(self, values, sample_weight)

    return update


def _moments_of_all(moments: Any) -> Any:
    def moments_of_all(self: Any, inputs: Any, mask: Any) -> Any:
        share, local = shares.current(), moments(self, inputs, mask)
        if share is None:
            return local
        weight = None if share.is_even else share.weight(tf.float64)
        return global_moments(self, inputs, mask, local, global_process_set, weight)

    return moments_of_all


# Random numbers. Each draw is that of the whole batch, of which a rank takes its rows: a layer's
# dropout is that of one process. Draws without rows, such as those for weights, are equal anyway.


def _drawn_for_all(draw: Any) -> Any:
    def draw_for_all(shape: Any, *args: Any, **kwargs: Any) -> Any:
        share = shares.current()
        if share is None or not _is_of_rows(shape, share):
            return draw(shape, *args, **kwargs)
        whole, first, rows = _whole_shape(shape, share)
        return draw(whole, *args, **kwargs)[first : first + rows]

    return draw_for_all


def _dropout_of_all(dropout: Any) -> Any:
    def dropout_of_all(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        share = shares.current()
        if share is None or not _is_of_rows(inputs.shape, share):
            return dropout(inputs, rate, noise_shape, seed)
        # The same for all samples, unless this rank has one sample.
        is_common = noise_shape is not None and tf.get_static_value(noise_shape[0]) == 1
        if is_common and not (isinstance(share.rows, int) and share.rows == 1):
            return dropout(inputs, rate, noise_shape, seed)
        whole, first, rows = _whole_shape(tf.shape(inputs), share)
        of_whole = None if noise_shape is None else (None, *noise_shape[1:])
        # As in the whole batch, whose values the dropout multiplies by 0 or 1 / (1 - rate).
        kept = dropout(tf.ones(whole, inputs.dtype), rate, of_whole, seed)[first : first + rows]
        return tf.where(kept > 0, inputs * kept, tf.zeros_like(inputs))

    return dropout_of_all


def _categorical_of_all(categorical: Any) -> Any:
    def categorical_of_all(logits: Any, *args: Any, **kwargs: Any) -> Any:
        share = shares.current()
        if share is None or not _is_of_rows(logits.shape, share):
            return categorical(logits, *args, **kwargs)
        whole, first, rows = _whole_shape(tf.shape(logits), share)
        after = whole[0] - first - rows
        padded = tf.pad(logits, [[first, after], [0, 0]])  # row i of the draw depends on i only
        return categorical(padded, *args, **kwargs)[first : first + rows]

    return categorical_of_all


def _is_of_rows(shape: Any, share: Share) -> bool:
    """Return whether a shape begins with rows of the batch; a static one, if it has as many."""
    length = shape.shape[0] if tf.is_tensor(shape) else len(shape)
    first = 0 if length == 0 else shape[0]
    first = tf.get_static_value(first) if tf.is_tensor(first) else first
    return first is None or (isinstance(share.rows, int) and int(first) == share.rows)


def _whole_shape(shape: Any, share: Share) -> tuple[tf.Tensor, Any, Any]:
    """Return the shape for the whole batch, the first row of this rank and its number of rows."""
    shape = tf.convert_to_tensor(shape if tf.is_tensor(shape) else list(shape), tf.int32)
    rows = shape[0]
    per_row = rows // tf.maximum(share.rows, 1)
    first = share.start * per_row
    length = tf.maximum(share.total * per_row, first + rows)
    return tf.concat([[length], shape[1:]], 0), first, rows
