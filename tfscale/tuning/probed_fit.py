"""The `fit` of a script as a probe runs it: nothing that would outlast the probe, or end it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras

from tfscale import callbacks as ours
from tfscale import runtime
from tfscale.callbacks.adaptive_record import AdaptiveRecord

logger = logging.getLogger("tfscale")

_of_keras = keras.callbacks
# Those that begin a file anew would empty that of the user's last run.
FILES_AND_STOPS: tuple[type, ...] = (
    _of_keras.BackupAndRestore,
    _of_keras.ModelCheckpoint,
    _of_keras.CSVLogger,
    _of_keras.TensorBoard,
    _of_keras.RemoteMonitor,
    _of_keras.EarlyStopping,
    _of_keras.TerminateOnNaN,
    ours.BackupAndRestore,
    ours.Checkpoint,
    ours.CommunicationReport,
    ours.ModelDistance,
)
if hasattr(_of_keras, "OrbaxCheckpoint"):  # not in the lowest Keras that is supported
    FILES_AND_STOPS += (_of_keras.OrbaxCheckpoint,)
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

    `AdaptiveBatchSize`, where it stays, sets batches and rates and writes no record.

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
    for callback in kept:
        if isinstance(callback, ours.AdaptiveBatchSize):
            callback._record = AdaptiveRecord(None)
    names = sorted({type(c).__name__ for c in every if c not in kept})
    if names and (not runtime.is_initialized() or runtime.rank() == 0):
        logger.warning("A probe runs without the script's %s.", ", ".join(names))
    return given | {"callbacks": kept}
