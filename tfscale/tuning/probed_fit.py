"""The `fit` of a script as a probe runs it: nothing that would outlast the probe, or end it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras

from tfscale import callbacks as ours
from tfscale import runtime

logger = logging.getLogger("tfscale")

_of_keras = keras.callbacks
FILES_AND_STOPS = (
    _of_keras.BackupAndRestore,
    _of_keras.ModelCheckpoint,
    _of_keras.EarlyStopping,
    _of_keras.TerminateOnNaN,
    ours.BackupAndRestore,
    ours.Checkpoint,
)
RATES_AND_SIZES = (
    _of_keras.LearningRateScheduler,
    _of_keras.ReduceLROnPlateau,
    ours.LearningRateScheduleCallback,
    ours.AdaptiveBatchSize,
    ours.BatchSizeSchedule,
    _of_keras.SwapEMAWeights,  # groups have no average over time in common
)


def arguments_of(
    fit: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    left_out: tuple[type, ...],
) -> dict[str, Any]:
    """Return by name what a script gives to `fit`, without some of its callbacks.

    Args:
        fit: Keras's.
        arguments: By position, the model among them.
        options: By name.
        left_out: Classes of callbacks; one is told of, also where `RankZero` holds it.
    """
    given = inspect.signature(fit).bind(*arguments, **options).arguments
    callbacks = given.get("callbacks") or []
    if isinstance(callbacks, _of_keras.CallbackList):
        callbacks = callbacks.callbacks
    every = keras.tree.flatten(callbacks)
    kept = [c for c in every if not isinstance(getattr(c, "callback", c), left_out)]
    names = sorted({type(c).__name__ for c in every if c not in kept})
    if names and (not runtime.is_initialized() or runtime.rank() == 0):
        logger.warning("A probe runs without the script's %s.", ", ".join(names))
    return given | {"callbacks": kept}
