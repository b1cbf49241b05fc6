"""Measure the gradients of several batch sizes, and recommend sizes.

Norms, descent condition and gradient noise scale, [T] 5.1.4.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches, read_batches
from tfscale.files import write_findings
from tfscale.internals.keras import build_from_spec, is_built
from tfscale.measure.growth import noise_scale
from tfscale.measure.provenance import describe
from tfscale.plan.forecast import grid


@dataclass(frozen=True)
class SizeMeasures:
    """Gradients g_B of batches of one size, all at the same parameters.

    g is the mean gradient over all samples used.
    """

    batch_size: int  # B, in samples
    batches: int  # number of gradients measured
    mean_norm: float  # of ||g_B||
    mean_square: float  # of ||g_B||^2
    mean_distance: float  # of ||g_B - g||
    descent_share: float  # share of batches with ||g_B - g|| < ||g_B||


@dataclass(frozen=True)
class Stage:
    """Measurements after some epochs of training."""

    epoch: int  # epochs trained before
    full_norm: float  # ||g||
    noise_scale: float  # tr(Sigma) / ||g||^2 in samples, from the smallest and the largest size
    sizes: tuple[SizeMeasures, ...]  # ascending by batch size


def measure(
    model: keras.Model,
    data: GlobalBatches,
    batch_sizes: Sequence[int],
    samples: int = 4096,
    *,
    epoch: int = 0,
    seed: int = 0,
    class_weight: Mapping[int, float] | None = None,
) -> Stage:
    """Measure the gradients of a model at its present parameters.

    The loss is that of training (dropout, batch statistics, regularization). Moving statistics and
    states of random numbers are restored afterwards.
    The model is compiled, and built from the data if necessary. As many `samples` are used for
    each size; g is the mean over batches of the largest size. `seed` gives the order of samples,
    and `epoch` is stored in the result.

    Source: [T] 5.1.4; McCandlish et al. (2018) for the noise scale.
    """
    sizes = sorted(set(batch_sizes))
    samples = min(samples, data.samples)
    if len(sizes) < 2 or sizes[0] < 1 or sizes[-1] > samples:
        raise ConfigError(
            "batch_sizes must be two or more, from 1 sample to the number of samples used. "
            f"Received: batch_sizes={list(batch_sizes)}, samples={samples}. Use smaller sizes, "
            "or more samples."
        )
    read = functools.partial(read_batches, data, seed=seed, class_weight=class_weight)
    if not is_built(model):
        build_from_spec(model, lambda: _spec_of(next(read(1))))
    kept = [(v, v.numpy()) for v in model.non_trainable_variables]
    try:
        gradient = _gradient_of(model)

        def gradients(size: int) -> Iterable[np.ndarray]:
            batches = itertools.islice(read(size), samples // size)
            return (gradient(*(*batch, None, None)[:3]).numpy() for batch in batches)

        full = functools.reduce(np.add, gradients(sizes[-1])) / (samples // sizes[-1])
        measured = tuple(_measure_size(size, gradients(size), full) for size in sizes)
    finally:
        for variable, value in kept:
            variable.assign(value)
    first, last = measured[0], measured[-1]
    scale = noise_scale(first.mean_square, first.batch_size, last.mean_square, last.batch_size)
    return Stage(epoch, float(np.linalg.norm(full)), scale, measured)


def _measure_size(size: int, gradients: Iterable[np.ndarray], full: np.ndarray) -> SizeMeasures:
    pairs = [(np.linalg.norm(g), np.linalg.norm(g - full)) for g in gradients]
    norms, distances = np.array(pairs).T
    return SizeMeasures(
        batch_size=size,
        batches=len(pairs),
        mean_norm=float(norms.mean()),
        mean_square=float((norms**2).mean()),
        mean_distance=float(distances.mean()),
        descent_share=float((distances < norms).mean()),
    )


def _gradient_of(model: keras.Model) -> Any:
    """Return a function from a batch to the gradient of the training loss, as one vector."""

    @tf.function(reduce_retracing=True)
    def gradient(x: Any, y: Any, weight: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
        variables = [v.value for v in model.trainable_variables]
        zero = tf.UnconnectedGradients.ZERO
        of_batch = tape.gradient(loss, variables, unconnected_gradients=zero)
        parts = [tf.cast(tf.convert_to_tensor(g), tf.float64) for g in of_batch]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)

    return gradient


def _spec_of(batch: tuple) -> Any:
    return keras.tree.map_structure(
        lambda part: tf.TensorSpec((None, *part.shape[1:]), part.dtype), batch
    )


_CLOSENESS = 0.7  # of the smallest size's norm, half of its square: "similar" in [T] 5.1.4
_DESCENT_SHARE = 0.5  # "most of the iterations"


@dataclass(frozen=True)
class Advice:
    """Recommended arguments of `AdaptiveBatchSize`, with a reason for each."""

    start_batch_size: int  # also for a fixed batch
    max_batch_size: int
    reasons: tuple[str, str]


def advise(stages: Sequence[Stage]) -> Advice:
    """Recommend batch sizes from stages that were measured with the same sizes.

    The start is the largest measured size whose mean ||g_B|| is at least 70 % of the smallest
    size's at every stage; so the smallest size should be known to train well. The descent condition
    ||g_B - g|| < ||g_B|| is met more easily by larger batches, so it cannot give a maximum, but a
    start that fails it in most batches is raised to the smallest size that meets it. The maximum
    is the largest measured size up to the noise scale of the last stage: beyond it, more samples
    add little information to a batch.

    Source: [T] 5.1.4; McCandlish et al. (2018) for the maximum.
    """
    sizes = [size.batch_size for size in stages[0].sizes]

    def is_close(index: int) -> bool:
        return all(s.sizes[index].mean_norm >= _CLOSENESS * s.sizes[0].mean_norm for s in stages)

    def descends(index: int) -> bool:
        return all(s.sizes[index].descent_share >= _DESCENT_SHARE for s in stages)

    last_close = 0
    while last_close + 1 < len(sizes) and is_close(last_close + 1):
        last_close += 1
    start = next((i for i in range(last_close, len(sizes)) if descends(i)), len(sizes) - 1)
    norms = ", ".join(f"{s.sizes[start].mean_norm / s.sizes[0].mean_norm:.0%}" for s in stages)
    why = f"the gradient's norm is {norms} of that of a batch of {sizes[0]} (stage by stage)"
    if start > last_close:
        why = (
            f"the norm alone would allow {sizes[last_close]}, but below {sizes[start]} most "
            "gradients are no direction of descent"
        )
    if not descends(start):
        why += "; even so, most gradients are no direction of descent: measure larger sizes"
    noise = stages[-1].noise_scale
    below = [i for i, size in enumerate(sizes) if size <= noise]
    maximum = max([start, *below])
    text = f"the gradient noise scale after {stages[-1].epoch} epochs is {noise:.4g} samples"
    if maximum == len(sizes) - 1 and noise > sizes[-1]:
        text += ", above all sizes measured"
    elif maximum == start:
        text += ", so that little is gained above the start"
    return Advice(sizes[start], sizes[maximum], (why, text))


def write_report(
    stages: Sequence[Stage], folder: str | Path, made: Mapping[str, str] | None = None
) -> str:
    """Return tables and the recommendation in Markdown; write `batch_size.json`, `batch_size.png`.

    The picture needs matplotlib. `made` says what made the measurements.
    """
    advice = advise(stages)
    content = {
        "made": dict(made or describe()),
        "stages": [dataclasses.asdict(stage) for stage in stages],
        "advice": dataclasses.asdict(advice),
    }
    write_findings(folder, "batch_size", content, lambda path: _draw(stages, advice, path))
    head = ["batch", "batches", "mean norm", "mean distance from g", "descent"]
    lines = []
    for stage in stages:
        body = []
        for size in stage.sizes:
            norms = f"{size.mean_norm:.4g}", f"{size.mean_distance:.4g}"
            body.append([size.batch_size, size.batches, *norms, f"{size.descent_share:.0%}"])
        title = (
            f"After {stage.epoch} epochs: ||g|| = {stage.full_norm:.4g}, noise scale "
            f"{stage.noise_scale:.4g} samples."
        )
        lines += [title, "", *grid(head, body), ""]
    lines.append(f"Start with {advice.start_batch_size}: {advice.reasons[0]}.")
    lines.append(f"Grow up to {advice.max_batch_size}: {advice.reasons[1]}.")
    return "\n".join(lines) + "\n"


def _draw(stages: Sequence[Stage], advice: Advice, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    norms, shares = figure.subplots(1, 2)
    for stage in stages:
        sizes = [s.batch_size for s in stage.sizes]
        label = f"after {stage.epoch} epochs (noise scale {stage.noise_scale:.3g})"
        norms.plot(sizes, [s.mean_norm for s in stage.sizes], "o-", ms=4, label=label)
        shares.plot(sizes, [s.descent_share for s in stage.sizes], "o-", ms=4)
    norms.set(ylabel="Mean norm of the gradient", ylim=(0.0, None))
    norms.legend(fontsize=8)
    shares.set(ylabel="Share of batches that descend", ylim=(-0.03, 1.03))
    for axes in (norms, shares):
        axes.set(xscale="log", xlabel="Batch size")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        for size in {advice.start_batch_size, advice.max_batch_size}:
            axes.axvline(size, color="0.6", ls=":")
    figure.savefig(path, dpi=120)
