"""Steps on shares of batches, which give the numbers of steps on whole batches.

With `tfscale.distribute` a model's `train_step`, `test_step` and `predict_step` are given whole
batches and cut out this rank's rows; in a `fit` whose batches of a dataset grow, its `train_step`
does (`share_batches`). Within them, and only there,

* losses divide by what all ranks have, where a rank's own rows do not tell (masks, sample weights,
  sums, Dice);
* means of scalars weigh a rank by its rows, and so does the optimizer (`exchange/batch_shares.py`);
* `tape.gradient` of one value for each row is that of a sum, which no rank's weight divides, and so
  is the loss by `add_loss` with one value for each row;
* BatchNormalization uses the statistics of the whole batch;
* random numbers are drawn for the whole batch, and each rank takes those of its rows;
* metrics do not change on a rank that has no rows, and computes one that does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import collectives, runtime
from tfscale.comm.runtime import Sum, global_process_set
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.batch_shares import RowsOfBatch, Share
from tfscale.exchange.sync_batch_norm import global_moments
from tfscale.fit.batches import BatchComparison
from tfscale.fit.metric_updates import is_updating, updating
from tfscale.internals.classes import Patches, sums_over_batch, weights_with_mask
from tfscale.internals.keras import drop_functions, replace_step
from tfscale.internals.trace import block_layout, joins_scalars, note_shape

Look = Callable[[Any], Any]  # at a whole batch, before its step
_GATHERED = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.int8, tf.uint8)


def patch(patches: Patches, batch_norm: str) -> None:
    """Patch what steps call; without effect outside of steps."""
    patches.wrap_reduction(_reduced_over_ranks)
    patches.wrap_added_losses(_added_over_ranks)
    patches.wrap_losses(_of_whole_batch)
    patches.wrap(keras.metrics.Mean, "update_state", _weighted_mean)
    patches.wrap(keras.Variable, "assign", _of_rows_that_count)
    patches.wrap(tf.GradientTape, "gradient", _of_sums_over_ranks)
    patches.wrap_draws(_drawn_for_all, _dropout_of_all, _categorical_of_all)
    patches.wrap(tf, "shape", _shape_with_layout)
    if batch_norm == "global":
        patches.wrap_moments(_moments_of_all)


# The steps of a model.


def on_share(step: Callable[[Any], Any], look: Look) -> Callable[[Any], Any]:
    """Make a training or test step of whole batches one of this rank's rows.

    `look` is called with whole batches first.
    """

    @functools.wraps(step)
    def step_on_share(batch: Any) -> Any:
        rider = look(batch)
        share = shares.share_of(batch)
        if share is None:
            return step(batch)
        shares.note_weight(share)
        # No gradient is sent before the batch is known to be that of the others: a rank whose
        # comparison fails first would leave them waiting for its own.
        with tf.control_dependencies([] if rider is None else [rider.signs]):
            part = shares.cut(batch, share)
        with shares.entering(share, rider):
            return step(part)

    step_on_share.plain_step = step  # type: ignore[attr-defined]
    return step_on_share


def on_all_rows(step: Callable[[Any], Any], look: Look) -> Callable[[Any], Any]:
    """Make a predict step compute this rank's rows and return those of all ranks, in order."""

    @functools.wraps(step)
    def step_on_all_rows(batch: Any) -> Any:
        rider = look(batch)
        share = shares.share_of(batch)
        if share is None:
            return step(batch)
        with tf.control_dependencies([] if rider is None else [rider.signs]):
            part = shares.cut(batch, share)
        with shares.entering(share):
            outputs = step(part)

        def gather(rows: tf.Tensor) -> tf.Tensor:
            return collectives.allgather(share.counted(rows), name="rows of predict")

        if all(map(_can_gather, keras.tree.flatten(outputs))):
            return keras.tree.map_structure(gather, outputs)
        if isinstance(batch, RowsOfBatch):
            _require_gathered(part)
            batch = keras.tree.map_structure(gather, part)
        return step(batch)  # every rank computes all

    step_on_all_rows.plain_step = step  # type: ignore[attr-defined]
    return step_on_all_rows


# The training step of a model in a `fit` whose batches all ranks read.


class _StepInFit:
    """A model's `train_step`, which computes this rank's rows while a `fit` has whole batches."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._step, self._comparison = step, BatchComparison()
        self._on_rows = on_share(step, self._comparison)
        self._has_whole_batches = False
        self.step_in_fit = self  # functions that wrap this one have the attribute, too

    def __call__(self, batch: Any) -> Any:
        if not self._has_whole_batches:
            return self._step(batch)
        with Patches() as patches:
            patch(patches, "global")
            return self._on_rows(batch)

    @property
    def has_whole_batches(self) -> bool:
        """True while a `fit` runs in which all ranks read the same batches."""
        return self._has_whole_batches

    def expect(self, data: Any) -> None:
        """Expect whole batches of a dataset, to be compared between ranks; None: this rank's."""
        self._has_whole_batches = data is not None
        if data is not None:
            self._comparison.expect(data, "fit")

    def begin_epoch(self, epoch: int, first_step: int) -> None:
        """As for `BatchComparison`."""
        self._comparison.begin_epoch(epoch, first_step)


def begin_epoch(model: keras.Model, epoch: int, first_step: int) -> None:
    """Let errors about batches of `share_batches` name the epoch that begins, and its batch."""
    step = _step_in_fit_of(model)
    if step is not None:
        step.begin_epoch(epoch, first_step)


def share_batches(model: keras.Model, data: tf.data.Dataset | GlobalBatches | None) -> None:
    """Let training steps compute this rank's rows of whole batches, until this is called again.

    The step is wrapped once, and traced again at each change. Without effect on one rank, and with
    `tfscale.distribute`, which does so anyway.

    Args:
        model: The model that trains.
        data: The data of the batches, which must be the same on all ranks; it tells why they are
            not. None if each rank has batches of its own.
    """
    if runtime.is_single() or shares.are_used():
        return
    step = _step_in_fit_of(model)
    if (data is not None) == (step is not None and step.has_whole_batches):
        return
    if step is None:
        step = _StepInFit(model.train_step)
        replace_step(model, "train_step", step)
    step.expect(data)
    drop_functions(model, "train_function")


def computes_rows(model: keras.Model, step: str) -> bool:
    """Return whether a step of a model ("train_step", ...) is given batches that all ranks read."""
    step_in_fit = _step_in_fit_of(model) if step == "train_step" else None
    return shares.are_used() or (step_in_fit is not None and step_in_fit.has_whole_batches)


def _step_in_fit_of(model: keras.Model) -> _StepInFit | None:
    return getattr(getattr(model, "train_step", None), "step_in_fit", None)


def plain_step(step: Any) -> Any:
    """Return the step on whole batches that one of a model is made of; None if it is not."""
    return getattr(step, "plain_step", None)  # also of what wraps it by functools.wraps


def _require_gathered(rows: Any) -> None:
    for part in keras.tree.flatten(rows):
        if not _can_gather(part):
            raise ConfigError(
                "decode must be 'batches' for a model with such outputs, each of which all ranks "
                f"compute. Received: decode='rows', and inputs of {part.dtype.name}. Pass "
                "decode='batches' to tfscale.distribute, or --decode batches."
            )


def _can_gather(output: Any) -> bool:
    is_dense = tf.is_tensor(output) and not isinstance(output, tf.RaggedTensor | tf.SparseTensor)
    return is_dense and output.shape.rank != 0 and output.dtype in _GATHERED


# Losses and metrics.


def _reduced_over_ranks(
    reduce: Any,
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
    share_of_sum = _share_of_sum(share, loss.dtype)
    if reduction == "sum":
        return loss * share_of_sum
    is_weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
    if mask is None and not is_weighted:
        return loss
    weights = weights_with_mask(sample_weight if is_weighted else None, mask, loss.dtype)
    divisor = tf.stop_gradient(tf.reduce_sum(tf.cast(weights, loss.dtype)))
    if share.may_be_empty:
        divisor = tf.where(share.rows > 0, divisor, tf.zeros_like(divisor))
    whole_divisor = collectives.allreduce(divisor, op=Sum, name="divisor of loss")
    return loss * tf.math.divide_no_nan(divisor, whole_divisor) * share_of_sum


def _share_of_sum(share: Share, dtype: Any) -> tf.Tensor:
    """Return the factor of a sum over this rank's rows.

    The optimizer weighs a rank by rows / (total / size) in its mean over ranks, which makes a sum
    over all rows of the ranks' sums times this factor. It is 0 without rows.
    """
    return tf.math.divide_no_nan(tf.cast(share.total, dtype), tf.cast(share.rows, dtype))


def _added_over_ranks(add_up: Any, model: Any, loss: Any) -> Any:
    """Make the sum of a value for each row, as given to `add_loss`, that over all rows."""
    share = shares.current()
    total = add_up(model, loss)
    if share is None or not _has_row_values(loss, share):
        return total
    return total * _share_of_sum(share, total.dtype)


def _of_whole_batch(call: Any, loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Give losses that divide sums over a batch the rows of all ranks."""
    share = shares.current()
    if share is not None and loss.fn is keras.losses.circle:
        raise ConfigError(
            "loss must not compare samples of a batch. Received: Circle, which compares all "
            "samples of a batch. Use GlobalBatches without tfscale.distribute, and gather rows by "
            "tfscale.allgather: see 'An unchanged script' in the documentation."
        )
    if share is None or not sums_over_batch(loss):
        return call(loss, y_true, y_pred)
    # The gather adds up the ranks' gradients of rows, and the optimizer averages them with the
    # weights of the ranks that hold the rows; those of the ranks that add them count here.
    weight = share.weight(y_pred.dtype)
    y_pred = _with_gradient(y_pred, lambda gradient: tf.math.divide_no_nan(gradient, weight))
    predictions, targets = (
        collectives.allgather(share.counted(rows), gradient="adjoint", name=f"{name} of loss")
        for rows, name in ((y_pred, "predictions"), (y_true, "targets"))
    )
    return _with_gradient(call(loss, targets, predictions), lambda gradient: gradient * weight)


def _with_gradient(values: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Return values whose gradient is changed on its way back."""
    return tf.custom_gradient(lambda same: (tf.identity(same), change))(values)


def _weighted_mean(update_state: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    share = shares.current()
    is_scalar = len(getattr(values, "shape", ())) == 0 and not isinstance(values, list | tuple)
    if share is not None and not share.is_even and is_scalar and sample_weight is None:
        sample_weight = share.weight(metric.dtype)
    with updating(metric):  # the metrics that losses keep are not watched otherwise
        return update_state(metric, values, sample_weight)


def _of_rows_that_count(assign: Any, variable: Any, value: Any) -> Any:
    """Leave the variables of metrics as they are on a rank without rows."""
    share = shares.current()
    if share is None or not share.may_be_empty or not is_updating():
        return assign(variable, value)
    value = keras.ops.convert_to_tensor(value, dtype=variable.dtype)
    if tuple(value.shape) != tuple(variable.shape):
        return assign(variable, value)  # Keras's error
    before = tf.convert_to_tensor(variable.value)
    return assign(variable, tf.where(share.rows > 0, value, before))


# Gradients.


def _of_sums_over_ranks(
    gradient: Any,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Make the gradient of one value for each row that of the sum over all rows.

    TensorFlow adds up the elements of a target. Gradients for variables meet the optimizer, which
    averages them over ranks; those for tensors, as in a gradient penalty, stay with their rows.
    """
    share = shares.current()
    targets, flat = tf.nest.flatten(target), tf.nest.flatten(sources)
    is_variable = [hasattr(source, "handle") for source in flat]
    are_rows = [share is not None and _has_row_values(item, share) for item in targets]
    if share is None or not any(are_rows) or not any(is_variable):
        return gradient(tape, target, sources, output_gradients, unconnected_gradients)
    outputs = [None] * len(targets)
    if output_gradients is not None:
        outputs = tf.nest.flatten(output_gradients)
    weighted = []
    for item, is_rows, output in zip(targets, are_rows, outputs, strict=True):
        output = tf.ones_like(item) if output is None else tf.convert_to_tensor(output)
        weighted.append(output * _share_of_sum(share, item.dtype) if is_rows else output)
    weighted = tf.nest.pack_sequence_as(target, weighted)
    gradients = gradient(tape, target, sources, weighted, unconnected_gradients)
    if all(is_variable):
        return gradients
    flat_gradients = []
    for source, of_source, is_own in zip(
        flat, tf.nest.flatten(gradients), is_variable, strict=True
    ):
        if of_source is not None and not is_own:
            of_source = tf.math.divide_no_nan(of_source, _share_of_sum(share, source.dtype))
        flat_gradients.append(of_source)
    return tf.nest.pack_sequence_as(sources, flat_gradients)


def _has_row_values(values: Any, share: Share) -> bool:
    """Return whether a target of a tape has a value for each row, not one for each of some losses.

    A static number of values that is no number of this rank's rows belongs to no rows, and neither
    does one that was made of single numbers. In eager steps the number alone tells.
    """
    if not tf.is_tensor(values) or values.shape.rank == 0:
        return False
    length = values.shape[0] if values.shape.rank else None
    if length is None:
        return True
    is_multiple = isinstance(share.computed, int) and length % share.computed == 0
    return is_multiple and not joins_scalars(values)


def _moments_of_all(moments: Any, layer: Any, inputs: Any, mask: Any) -> Any:
    local = moments(layer, inputs, mask)
    if shares.current() is None:
        return local
    return global_moments(layer, inputs, mask, local, global_process_set)


# Random numbers. Each draw is that of the whole batch, of which a rank takes its rows: a layer's
# dropout is that of one process. Draws without rows, such as those for weights, are equal anyway.


def _drawn_for_all(draw: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
    rows = _rows_of_draw(shape, shape)
    if rows is None:
        return draw(shape, *args, **kwargs)
    return tf.gather(draw(rows.whole, *args, **kwargs), rows.indices)


def _dropout_of_all(
    dropout: Any, inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None
) -> Any:
    share = shares.current()
    # The same for all samples, unless this rank has one sample.
    is_common = noise_shape is not None and tf.get_static_value(noise_shape[0]) == 1
    is_single = share is not None and isinstance(share.computed, int) and share.computed == 1
    is_common = is_common and not is_single
    rows = None if is_common else _rows_of_draw(inputs.shape, inputs)
    if rows is None:
        return dropout(inputs, rate, noise_shape, seed)
    of_whole = None if noise_shape is None else (None, *noise_shape[1:])
    # As in the whole batch, whose values the dropout multiplies by 0 or 1 / (1 - rate).
    kept = tf.gather(dropout(tf.ones(rows.whole, inputs.dtype), rate, of_whole, seed), rows.indices)
    return tf.where(kept > 0, inputs * kept, tf.zeros_like(inputs))


def _categorical_of_all(categorical: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    rows = _rows_of_draw(logits.shape, logits)
    if rows is None:
        return categorical(logits, *args, **kwargs)
    # Row i of the draw depends on row i only.
    whole = tf.scatter_nd(rows.indices[:, tf.newaxis], logits, rows.whole)
    return tf.gather(categorical(whole, *args, **kwargs), rows.indices)


def _shape_with_layout(shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Let shapes be known as those of their tensors: static ones are constants of the graph."""
    result = shape(*args, **kwargs)
    tensor = args[0] if args else kwargs.get("input")
    if shares.current() is not None and isinstance(tensor, tf.Tensor):
        note_shape(result, tensor)
    return result


@dataclass(frozen=True)
class _Draw:
    """A draw for the whole batch: its shape, and which of its rows are this rank's."""

    whole: tf.Tensor
    indices: tf.Tensor


def _rows_of_draw(shape: Any, source: Any) -> _Draw | None:
    """Return the draw of the whole batch for a shape; None if it does not begin with rows of it.

    A static shape does if it has as many rows as this rank, or k times as many if it is seen how
    they were made: `source` is `tf.shape` of a tensor, or a tensor of that shape. The k rows of a
    sample follow each other or not, as `block_layout` tells.
    """
    share = shares.current()
    length = shape.shape[0] if tf.is_tensor(shape) else len(shape)
    if share is None or length == 0:
        return None
    layout = block_layout(source) if tf.is_tensor(source) else None
    if tf.is_tensor(shape):  # of an element of a constant TensorFlow knows no value
        static = tf.get_static_value(shape, partial=True)
        first = None if static is None else static[0]
    else:
        first = tf.get_static_value(shape[0]) if tf.is_tensor(shape[0]) else shape[0]
    others = share.others
    if first is not None:
        others = tuple(rows for rows in others if isinstance(rows, int) and rows == first)
        if not isinstance(share.computed, int) or (first % share.computed and not others):
            return None
        if first != share.computed and layout is None and not others:
            return None
    if source is not shape:
        shape = tf.shape(source)
    shape = tf.convert_to_tensor(shape if tf.is_tensor(shape) else list(shape), tf.int32)
    positions, per_row = tf.range(shape[0]), shape[0] // share.computed
    if layout == "repeated":
        indices = positions + share.start * per_row
    else:
        indices = (
            positions // share.computed * share.total + share.start + positions % share.computed
        )
    # A length that is no multiple of the rows, such as one of sequences, is common to all samples.
    is_of_rows = shape[0] % share.computed == 0
    whole = tf.where(is_of_rows, share.total * per_row, shape[0])
    indices = tf.where(is_of_rows, indices, positions)
    if others:  # unless it is that of a part with another number of rows, which all ranks share
        n_ranks = runtime.size()
        is_other = ~is_of_rows & tf.reduce_any([shape[0] == rows for rows in others])
        whole = tf.where(is_other, n_ranks * shape[0], whole)
        indices = tf.where(is_other, runtime.rank() * shape[0] + positions, indices)
    return _Draw(tf.concat([[whole], shape[1:]], 0), indices)
