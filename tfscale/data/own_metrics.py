"""Metrics of one rank's samples that are taken for those of all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.data.keras_pass import KerasPass, callbacks_of_evaluate, callbacks_of_fit

logger = logging.getLogger("tfscale")

JUDGES = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)

_JUDGED = (
    "%s sees the metrics of each rank's own samples. Unless all ranks are given the same, they may "
    "decide differently: other learning rates, other best weights at the end. Put "
    "MetricAverageCallback before it."
)
_EVALUATED = (
    "evaluate() returns the metrics of this rank's slices of GlobalBatches, not of all samples. "
    "Call it on all ranks with callbacks=[tfscale.callbacks.MetricAverageCallback()]."
)
_told: set[str] = set()


def averages_metrics(callback: Any) -> bool:
    """Return whether callbacks behind this one see metrics of all ranks."""
    return bool(getattr(callback, "averages_metrics", False))


def early_judge(callbacks: Sequence[Any]) -> str | None:
    """Return the name of the first callback that judges by metrics of this rank alone.

    Args:
        callbacks: In the order of their calls.
    """
    for callback in callbacks:
        if averages_metrics(callback):
            return None
        if isinstance(callback, JUDGES):
            return type(callback).__name__
    return None


def warn_of_judges() -> None:
    """Warn, once and on one rank, where the running `fit` judges by metrics of single ranks."""
    judge = early_judge(callbacks_of_fit())
    if judge is not None:
        _warn(_JUDGED, judge)


def warn_of_evaluation(caller: KerasPass) -> None:
    """Warn, once and on one rank, where an `evaluate` outside of `fit` leaves metrics as they are.

    Args:
        caller: Reads `GlobalBatches`.
    """
    is_of_all = any(map(averages_metrics, callbacks_of_evaluate()))
    if caller.caller == "evaluate" and not caller.is_inside_fit and not is_of_all:
        _warn(_EVALUATED)


def _warn(text: str, *names: str) -> None:
    is_one_of_several = runtime.is_initialized() and runtime.size() > 1
    if is_one_of_several and runtime.rank() == 0 and text not in _told:
        _told.add(text)
        logger.warning(text, *names)
