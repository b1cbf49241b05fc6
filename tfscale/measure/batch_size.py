"""How gradients depend on the batch size: norms, descent condition, gradient noise scale."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.data.control import read_batches
from tfscale.data.global_batches import GlobalBatches
from tfscale.fit import building
from tfscale.measure.theta import noise_scale


@dataclass(frozen=True)
class SizeMeasures:
    """Gradients g_B of batches of one size, all at the same parameters.

    Attributes:
        batch_size: B, in samples.
        batches: How many gradients were taken.
        mean_norm: Mean of ||g_B||.
        mean_square: Mean of ||g_B||^2.
        mean_distance: Mean of ||g_B - g||, where g is the mean gradient over all samples used.
        descent_share: Share of batches with ||g_B - g|| < ||g_B||.
    """

    batch_size: int
    batches: int
    mean_norm: float
    mean_square: float
    mean_distance: float
    descent_share: float


@dataclass(frozen=True)
class Stage:
    """What was measured after some epochs of training.

    Attributes:
        epoch: Epochs trained before.
        full_norm: ||g||.
        noise_scale: tr(Sigma) / ||g||^2 in samples, from the smallest and the largest size.
        sizes: Ascending by batch size.
    """

    epoch: int
    full_norm: float
    noise_scale: float
    sizes: tuple[SizeMeasures, ...]


def measure(
    model: keras.Model,
    data: GlobalBatches,
    batch_sizes: Sequence[int],
    samples: int = 4096,
    *,
    epoch: int = 0,
    seed: int = 0,
) -> Stage:
    """Measure the gradients of a model at its present parameters.

    The loss is that of training (dropout, batch statistics, regularization). Parameters, moving
    statistics and states of random numbers are as before afterwards.

    Args:
        model: Compiled; its loss is what `compute_loss` returns. It is built from the data, where
            it is not built yet.
        data: What it trains on.
        batch_sizes: Two sizes or more.
        samples: Used for each size; at least the largest size.
        epoch: Noted in the result.
        seed: Of the order of samples.

    Returns:
        One stage; the mean gradient g is that over batches of the largest size.

    Raises:
        ConfigError: The sizes do not fit each other, the samples or the data; or these do not
            suffice to build the model.

    Source: [T] 5.1.4; McCandlish et al. (2018) for the noise scale.
    """
    sizes = sorted(set(batch_sizes))
    samples = min(samples, data.samples)
    if len(sizes) < 2 or sizes[0] < 1 or sizes[-1] > samples:
        raise ConfigError(
            "There must be two batch sizes or more, from 1 sample to the number of samples used. "
            f"Received: batch_sizes={list(batch_sizes)}, samples={samples}. Use smaller sizes, or "
            "more samples."
        )
    if not building.is_built(model):
        building.build_from_spec(model, lambda: _spec_of(next(read_batches(data, 1, seed))))
    kept = [(v, v.numpy()) for v in model.non_trainable_variables]
    try:
        gradient = _gradient_of(model)

        def gradients(size: int) -> Iterable[list[tf.Tensor]]:
            batches = itertools.islice(read_batches(data, size, seed), samples // size)
            return (gradient(*_unpack(batch)) for batch in batches)

        full = _mean(gradients(sizes[-1]))
        measured = tuple(_measure_size(size, gradients(size), full) for size in sizes)
    finally:
        for variable, value in kept:
            variable.assign(value)
    first, last = measured[0], measured[-1]
    scale = noise_scale(first.mean_square, first.batch_size, last.mean_square, last.batch_size)
    return Stage(epoch, _norm(_dot(full, full)), scale, measured)


def _measure_size(
    size: int, gradients: Iterable[list[tf.Tensor]], full: list[tf.Tensor]
) -> SizeMeasures:
    full_square = _dot(full, full)
    norms, distances = [], []
    for gradient in gradients:
        square, product = _dot(gradient, gradient), _dot(gradient, full)
        norms.append(_norm(square))
        distances.append(_norm(square - 2 * product + full_square))
    n = len(norms)
    descends = sum(d < g for d, g in zip(distances, norms, strict=True))
    squares = math.fsum(g * g for g in norms)
    return SizeMeasures(
        size, n, math.fsum(norms) / n, squares / n, math.fsum(distances) / n, descends / n
    )


def _gradient_of(model: keras.Model) -> Any:
    """Return a function from a batch to the gradients of the training loss."""

    @tf.function(reduce_retracing=True)
    def gradient(x: Any, y: Any, weight: Any) -> list[tf.Tensor]:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
        found = tape.gradient(loss, [v.value for v in variables])
        pairs = zip(found, variables, strict=True)
        return [
            tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g) for g, v in pairs
        ]

    return gradient


def _spec_of(batch: tuple) -> Any:
    """Return the shapes of a batch of any size."""
    return keras.tree.map_structure(
        lambda part: tf.TensorSpec((None, *part.shape[1:]), part.dtype), batch
    )


def _unpack(batch: tuple) -> tuple:
    return (*batch, None, None)[:3]


def _mean(gradients: Iterable[list[tf.Tensor]]) -> list[tf.Tensor]:
    total: list[tf.Tensor] | None = None
    n = 0
    for gradient in gradients:
        total = gradient if total is None else [a + b for a, b in zip(total, gradient, strict=True)]
        n += 1
    assert total is not None  # there is at least one batch
    return [part / n for part in total]


def _dot(left: list[tf.Tensor], right: list[tf.Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    return math.fsum(float(tf.reduce_sum(tf.cast(a, tf.float64) * tf.cast(b, tf.float64)))
                     for a, b in pairs)  # fmt: skip


def _norm(square: float) -> float:
    """Return the root; rounding may leave the square of a vanishing distance below 0."""
    return math.sqrt(max(square, 0.0))
