"""What a `fit` with growing batches refuses, before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.callbacks import building
from tfscale.callbacks.backup_and_restore import BackupAndRestore
from tfscale.callbacks.learning_rate import LearningRateScheduleCallback
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.active_ranks import count_active
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import callbacks_of_fit, data_of_fit
from tfscale.data.own_metrics import early_judge
from tfscale.internals.optimizers import update_rule
from tfscale.measure.growth import GrowthSettings
from tfscale.scalable_schedule import ScalableSchedule

SETTERS = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
GROWTH_REMEDY = (
    "Choose start_batch_size, factor and max_batch_size accordingly, or "
    'active_ranks="grow", where a batch may be smaller than the number of ranks.'
)


def check_data(data: Any) -> None:
    """Refuse data whose batch size cannot change.

    Raises:
        ConfigError: It is not GlobalBatches.
    """
    if not isinstance(data, GlobalBatches):
        raise ConfigError(
            "The batch size can change inside of one fit only where tfscale cuts the batches; "
            "repeated or batched datasets would keep serving the old size. Received: "
            f"data={type(data).__name__}. Use tfscale.data.GlobalBatches(x, y, ...), or "
            "GlobalBatches.from_dataset(records, ...) with the dataset not batched or repeated."
        )


def check_sizes(
    data: GlobalBatches,
    sizes: Sequence[int],
    name: str = "max_batch_size",
    remedy: str = GROWTH_REMEDY,
) -> None:
    """Refuse batch sizes that the data or the ranks cannot serve.

    Args:
        data: What is trained on.
        sizes: Samples over all ranks, ascending.
        name: What the user knows the largest size as.
        remedy: What to do about a size that the ranks cannot share.

    Raises:
        ConfigError: The maximum is above the data, or a size cannot be shared out.
    """
    if sizes[-1] > data.samples:
        raise ConfigError(
            f"{name} must not be larger than the number of samples, or an epoch has no "
            f"step. Received: {name}={sizes[-1]}, samples={data.samples}. Use a smaller "
            f"{name}, or more data."
        )
    for size in sizes:
        try:
            data.steps_for(size)
        except ConfigError as error:
            raise ConfigError(
                f"Every batch size on the way, {list(sizes)}, must suit the ranks. Received: "
                f"{error} {remedy}"
            ) from error


def bounds_of(interval: int | tuple[int, int] | None, signal: str) -> tuple[int, int | None]:
    """Return the lowest and the highest interval that may be found; None: limited by the epochs.

    Raises:
        ConfigError: The signal finds none.
    """
    if not isinstance(interval, tuple):
        return 1, None
    if signal == "noise_scale":
        raise ConfigError(
            "With signal='noise_scale' interval is the fewest epochs between two growths. "
            f"Received: interval={interval!r}. Pass one number."
        )
    return interval


def check_settings(
    settings: GrowthSettings, data: GlobalBatches, first: int, has_surplus: bool
) -> None:
    """Refuse what this run's ranks, data and epochs do not allow.

    Args:
        settings: What the run chose.
        data: What it trains on.
        first: The epoch that it began with.
        has_surplus: Whether a batch may feed fewer ranks than there are.

    Raises:
        ConfigError: With the remedy.
    """
    check_decays(settings, first)
    check_sizes(data, settings.sizes)
    if settings.signal == "noise_scale" and has_surplus:
        check_compared(settings.sizes)


def check_compared(sizes: Sequence[int]) -> None:
    """Refuse batches that one rank alone would compute: no two gradients could be compared.

    Args:
        sizes: Batch sizes over all ranks, ascending; the last one grows no more.

    Raises:
        ConfigError: A batch that is to grow feeds one rank only.
    """
    lonely = [n for n in sizes[:-1] if count_active(n, runtime.size()) < 2]
    if lonely:
        raise ConfigError(
            "The gradient noise scale is estimated from gradients of two ranks at least. "
            f"Received: batch size {lonely[0]}, which feeds one of {runtime.size()} ranks. Start "
            "with a batch that two ranks share, or use signal='theta'."
        )


def check_decays(settings: GrowthSettings, first: int) -> None:
    """Refuse decays at which nobody would look.

    Args:
        settings: What the run chose.
        first: The epoch that the run began with.

    Raises:
        ConfigError: A decay falls into the warm-up, or the first epoch behind it.
    """
    end = first + settings.warmup_epochs
    early = [epoch for epoch in settings.decay_epochs if first <= epoch <= end]
    if early:
        raise ConfigError(
            "Before a decay there must be the warm-up and one epoch. Received: decay_epochs="
            f"{settings.decay_epochs}, warmup_epochs={settings.warmup_epochs}, in a run that "
            f"begins with epoch {first} (counted from 0). Decay from epoch {end + 1} on."
        )


def check_fit(callback: Any, data: GlobalBatches, warmup_epochs: int) -> None:
    """Refuse a `fit` in which batch size and rate could not be controlled.

    Args:
        callback: Whose `on_train_begin` calls this.
        data: What it controls.
        warmup_epochs: Epochs in which another callback may set the learning rate.

    A model that is not built is built from the data.

    Raises:
        ConfigError: With the remedy.
    """
    if data_of_fit() is not data:
        raise ConfigError(
            f"{type(callback).__name__} must be given the data that fit trains on. Received: "
            f"another object, {type(data_of_fit()).__name__}, in fit. Pass the same GlobalBatches "
            "to both."
        )
    check_alone(callback)
    if not building.is_built(callback.model):  # the first parameters must be known
        building.build_from_data(callback.model)
        building.build_optimizer(callback.model)
    check_rate(type(callback).__name__, callback.model)
    _check_order(callback, callbacks_of_fit(), warmup_epochs)


def check_rate(name: str, model: keras.Model) -> None:
    """Refuse a learning rate that cannot be set.

    Raises:
        ConfigError: It is a schedule without a wrapper.
    """
    rate = update_rule(model.optimizer)._learning_rate
    if not isinstance(rate, keras.Variable) and type(rate) is not ScalableSchedule:
        raise ConfigError(
            f"{name} changes the learning rate, which a schedule counted in steps would not "
            f"follow. Received: learning_rate={type(rate).__name__}. Use a number, or "
            "tfscale.ScalableSchedule(schedule)."
        )


def check_alone(own: Any) -> None:
    """Refuse a second callback that sets the batch size.

    Raises:
        ConfigError: There is one in the running `fit`.
    """
    others = [
        c for c in callbacks_of_fit() if getattr(c, "sets_batch_size", False) and c is not own
    ]
    if others:
        raise ConfigError(
            "One callback sets the batch size. Received: "
            f"{type(others[0]).__name__} and {type(own).__name__}. Remove one."
        )


def _check_order(own: Any, callbacks: Sequence[Any], warmup_epochs: int) -> None:
    place = {id(callback): index for index, callback in enumerate(callbacks)}
    judge = early_judge(callbacks)
    if runtime.size() > 1 and judge is not None:
        raise ConfigError(
            "What stops or slows training must see metrics of all ranks, or ranks decide "
            f"differently. Received: {judge} before MetricAverageCallback. Put "
            "MetricAverageCallback before it."
        )
    for callback in callbacks:
        name, index = type(callback).__name__, place[id(callback)]
        if isinstance(callback, SETTERS) or _sets_rate_later(callback, warmup_epochs):
            raise ConfigError(
                f"One callback sets the learning rate. Received: {name} and {type(own).__name__}. "
                "Remove it; use decay_epochs or saturation for decays, warmup_epochs for epochs "
                "in which another callback may set the rate."
            )
        if isinstance(callback, BackupAndRestore) and index > place.get(id(own), index):
            raise ConfigError(
                "A backup must be restored before training begins. Received: BackupAndRestore "
                f"behind {type(own).__name__}. Put BackupAndRestore first."
            )


def _sets_rate_later(callback: Any, warmup_epochs: int) -> bool:
    if not isinstance(callback, LearningRateScheduleCallback):
        return False
    return callback.end_epoch is None or callback.end_epoch > warmup_epochs
