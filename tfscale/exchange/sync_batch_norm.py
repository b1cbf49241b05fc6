"""Batch normalisation with the statistics of the global batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.comm.collectives import allgather
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import require
from tfscale.exchange import batch_shares
from tfscale.internals.classes import NormalizationByMoments
from tfscale.internals.keras import wrap_moments_of


@keras.saving.register_keras_serializable(package="tfscale")
class SyncBatchNormalization(NormalizationByMoments):
    """BatchNormalization whose training statistics are those of all ranks' samples together.

    Each layer exchanges 2 * channels + 1 values in the forward pass, and again in back-propagation.
    Means and variances of the ranks are combined by the parallel variance formula, weighted by the
    number of samples, so uneven batches are exact.

    Examples:
        >>> tfscale.init()
        >>> layer = tfscale.SyncBatchNormalization()
        >>> outputs = layer(tf.constant([[4.0], [8.0]]), training=True)
        >>> outputs.numpy().round().tolist()  # (4 - 6) / 2 and (8 - 6) / 2
        [[-1.0], [1.0]]
    """

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        fused: bool | None = False,
        **options: Any,
    ) -> None:
        """Create the layer.

        Args:
            process_set: Ranks whose samples are combined; not saved with the model. The default is
                that of the model's DistributedOptimizer: all ranks, its `process_set`, or, with
                `tfscale.LocalSGD`, the ranks of a group.
            fused: Must be False; kept for scripts written for Horovod.
            **options: As for keras.layers.BatchNormalization.

        Raises:
            ConfigError: `fused` is not False.
        """
        reason = "Leave it out: statistics of several ranks need the plain kernels of Keras."
        require(fused is False, "fused", "False", fused, reason)
        super().__init__(**options)
        self._process_set = self._own_set = process_set

    def follow(self, process_set: ProcessSet) -> bool:
        """Use the optimizer's process set unless one was given; return whether to trace again."""
        before = self._process_set
        self._process_set = process_set if self._own_set is global_process_set else self._own_set
        return self._process_set is not before

    def moments(self, inputs: Any, mask: Any, of_rows: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return mean and variance of the inputs of all ranks."""
        return global_moments(self, inputs, mask, of_rows, self._process_set)


_SET = "_tfscale_process_set"


def synchronize(layer: Any, process_set: ProcessSet) -> bool:
    """Let one layer of Keras use the samples of all ranks; return whether to trace again."""

    def of_all(moments: Any) -> Any:
        def moments_of_all(inputs: Any, mask: Any) -> tuple[Any, Any]:
            return global_moments(layer, inputs, mask, moments(inputs, mask), vars(layer)[_SET])

        return moments_of_all

    before, vars(layer)[_SET] = vars(layer).get(_SET), process_set
    wrap_moments_of(layer, of_all)
    return before is not process_set


def global_moments(
    layer: Any,
    inputs: Any,
    mask: Any,
    local: tuple[Any, Any],
    process_set: ProcessSet,
) -> tuple[Any, Any]:
    """Return mean and variance of all ranks' inputs of a BatchNormalization, given the local ones.

    In a step on shares that differ, this rank's gradients will be multiplied by its weight: those
    that other ranks send must have their ranks' weights instead. A rank of weight 0 does not count.
    Collective, where the process set has several ranks.
    """
    share = batch_shares.current()
    weight = None if share is None or share.is_even else share.weight(tf.float64)
    group = process_set.group()
    if group.size == 1 or group.rank < 0:
        return local
    mean, variance = local
    wide = tf.float64 if mean.dtype == tf.float64 else tf.float32
    count = tf.cast(_n_samples(layer, inputs, mask), wide)
    if weight is not None:
        count = tf.where(weight > 0, count, tf.zeros_like(count))
    # Without a sample the mean is NaN, which weight zero would not remove.
    mean, variance = (tf.where(count > 0, x, tf.zeros_like(x)) for x in (mean, variance))
    flat = [tf.reshape(tf.cast(x, wide), [-1]) for x in (mean, variance, count)]
    of_rows = tf.concat(flat, axis=0)
    if weight is not None:
        weight = tf.cast(weight, wide)
        of_rows = _with_gradient_times(of_rows, tf.math.divide_no_nan(tf.ones_like(weight), weight))
    rows = allgather(
        of_rows[tf.newaxis], gradient="adjoint", process_set=process_set, name=layer.path
    )
    rows = tf.ensure_shape(rows, [group.size, of_rows.shape[0]])
    if weight is not None:
        rows = _with_gradient_times(rows, weight)
    n_channels = mean.shape.num_elements()
    means, variances, counts = tf.split(rows, [n_channels, n_channels, 1], axis=1)
    weights = counts / tf.reduce_sum(counts)
    common = tf.reduce_sum(weights * means, axis=0)
    spread = variances + tf.math.squared_difference(means, common)
    total = tf.reduce_sum(weights * spread, axis=0)
    return (
        tf.cast(tf.reshape(common, mean.shape), mean.dtype),
        tf.cast(tf.reshape(total, variance.shape), variance.dtype),
    )


@tf.custom_gradient
def _with_gradient_times(values: tf.Tensor, factor: tf.Tensor) -> Any:
    """Return the values; their gradient is multiplied by a factor."""
    return tf.identity(values), lambda gradient: (gradient * factor, None)


def _n_samples(layer: Any, inputs: Any, mask: Any) -> tf.Tensor:
    """Return the number of values in each channel's statistics."""
    if mask is None:
        return tf.size(inputs) // tf.shape(inputs)[layer.axis]
    weights = tf.cast(mask, tf.float32)
    per_entry = tf.size(inputs) // tf.shape(inputs)[layer.axis] // tf.size(weights)
    return tf.reduce_sum(weights) * tf.cast(per_entry, tf.float32)
