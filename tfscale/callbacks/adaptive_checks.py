"""Conditions of `AdaptiveBatchSize` that are checked when training begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.callbacks.base import Callback
from tfscale.callbacks.checkpoint import BackupAndRestore
from tfscale.callbacks.learning_rate import LearningRateScheduleCallback
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import use_active_ranks
from tfscale.data.slices import count_active
from tfscale.fit.preparation import build
from tfscale.fit.session import FitSession
from tfscale.internals.keras import batch_spec_of, is_built, serve_again, symbol_of
from tfscale.internals.optimizers import rate_of, update_rule
from tfscale.internals.traits import judge_before_averages
from tfscale.measure.growth import GrowthSettings
from tfscale.optimizer.distributed import distributed_of
from tfscale.optimizer.scalable_schedule import ScalableSchedule

MEANS = ("sum_over_batch_size", "mean")
SETTERS = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)


def check_decays(settings: GrowthSettings, first: int) -> None:
    """Refuse decays in the warm-up or the first epoch after it, which would never take effect.

    `first` is the epoch in which the run began.
    """
    end = first + settings.warmup_epochs
    early = [epoch for epoch in settings.decay_epochs if first <= epoch <= end]
    if early:
        raise ConfigError(
            "Before a decay there must be the warm-up and one epoch. Received: decay_epochs="
            f"{settings.decay_epochs}, warmup_epochs={settings.warmup_epochs}, in a run that "
            f"begins with epoch {first} (counted from 0). Decay from epoch {end + 1} on."
        )


def check_compared(sizes: Sequence[int]) -> None:
    """Refuse growing batches that feed one rank only: there would be no gradients to compare."""
    lonely = [n for n in sizes[:-1] if count_active(n, runtime.size()) < 2]
    if lonely:
        raise ConfigError(
            "The gradient noise scale is estimated from gradients of two ranks at least. "
            f"Received: batch size {lonely[0]}, which feeds one of {runtime.size()} ranks. Start "
            "with a batch that two ranks share, or use signal='theta'."
        )


def check_rate_and_order(callback: Callback, warmup_epochs: int) -> None:
    """Refuse a `fit` in which the callback cannot control the rate; build the model if need be.

    Another callback may set the learning rate during the first `warmup_epochs`.
    """
    name, model = type(callback).__name__, callback.model
    if not is_built(model):  # the first parameters must be known
        build(model)
    rate = rate_of(update_rule(model.optimizer))
    if not isinstance(rate, keras.Variable) and type(rate) is not ScalableSchedule:
        raise ConfigError(
            f"{name} changes the learning rate, which a schedule counted in steps would not "
            f"follow. Received: learning_rate={type(rate).__name__}. Use a number, or "
            "tfscale.ScalableSchedule(schedule)."
        )
    _check_order(callback, callback.session.callbacks, warmup_epochs)


def _check_order(own: Any, callbacks: Sequence[Any], warmup_epochs: int) -> None:
    judge = judge_before_averages(callbacks)
    if runtime.size() > 1 and judge is not None:
        raise ConfigError(
            "What stops or slows training must see metrics of all ranks, or ranks decide "
            f"differently. Received: {judge} before MetricAverageCallback. Put "
            "MetricAverageCallback before it."
        )
    is_later = False
    for callback in callbacks:
        is_later, name = is_later or callback is own, type(callback).__name__
        if isinstance(callback, SETTERS) or _sets_rate_later(callback, warmup_epochs):
            raise ConfigError(
                f"One callback sets the learning rate. Received: {name} and {type(own).__name__}. "
                "Remove it; use decay_epochs or saturation for decays, warmup_epochs for epochs "
                "in which another callback may set the rate."
            )
        if isinstance(callback, BackupAndRestore) and is_later:
            raise ConfigError(
                "A backup must be restored before training begins. Received: BackupAndRestore "
                f"behind {type(own).__name__}. Put BackupAndRestore first."
            )


def _sets_rate_later(callback: Any, warmup_epochs: int) -> bool:
    if not isinstance(callback, LearningRateScheduleCallback):
        return False
    return callback.end_epoch is None or callback.end_epoch > warmup_epochs


def begin_with_surplus(session: FitSession) -> None:
    """Let a part of the ranks share the batches of a `fit`; the others repeat slices with weight 0.

    Called when training begins, with the model built.

    Raises:
        ConfigError: Weights would not make the loss, or the gradient, that of the active ranks.
    """
    _check_exchange(session)
    _check_weights(session)
    is_wide = has_wide_losses(session.model, session.call.epochs)
    use_active_ranks(session.data, weighs_samples=not is_wide)
    if session.call.epochs is not None:
        serve_again(session.call.epochs)


def _check_exchange(session: FitSession) -> None:
    """Refuse steps whose gradients are not averaged over all ranks: the weights assume that."""
    distributed = distributed_of(session.model.optimizer)
    strategy = None if distributed is None else distributed.strategy
    n_ranks = runtime.size() if distributed is None else distributed.process_set.size()
    if session.trains_apart or session.has_groups or n_ranks < runtime.size():
        way = "ParameterAveraging" if session.trains_apart else f"exchange={strategy}"
        raise ConfigError(
            'active_ranks="grow" needs gradients that all ranks average in every step: a rank '
            f"that rests has weight 0, the others more than 1. Received: {way}, {n_ranks} of "
            f"{runtime.size()} ranks. Use another exchange on all ranks, or active_ranks='all'."
        )


def _check_weights(session: FitSession) -> None:
    """Refuse losses that weights cannot turn into the mean over the active ranks."""
    if session.call.class_weight is not None:
        raise ConfigError(
            'active_ranks="grow" serves sample weights, and Keras takes them or class_weight. '
            "Received: class_weight in fit. Give GlobalBatches(sample_weight=) the weight of each "
            "sample's class, or use active_ranks='all'."
        )
    for loss in keras.tree.flatten(session.model.loss):
        reduction = getattr(loss, "reduction", MEANS[0])
        if reduction not in MEANS:
            raise ConfigError(
                'active_ranks="grow" needs losses that are means over samples, whatever their '
                f"weights: those of the ranks that rest are 0. Received: reduction={reduction!r} "
                f"of {loss.name!r}. Use reduction='sum_over_batch_size', or active_ranks='all'."
            )


def has_wide_losses(model: keras.Model, epochs: Any) -> bool:
    """Return whether losses have more than one value per sample, as for sequences or images.

    For a subclassed model the outputs are computed from a batch of `epochs`, Keras's iterator.
    """
    outputs = getattr(model, "outputs", None)
    if not outputs:
        batch = batch_spec_of(epochs)
        x = batch[0] if isinstance(batch, tuple) else batch
        outputs = model.compute_output_spec(keras.tree.map_structure(symbol_of, x))
    return any(len(output.shape) > 2 for output in keras.tree.flatten(outputs))
