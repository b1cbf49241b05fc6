"""Ranks that train without exchanging anything, which nobody would notice."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.internals.optimizers import optimizers_of
from tfscale.optimizer.distributed import is_distributed

logger = logging.getLogger("tfscale")

_TEXT = (
    "The ranks of this job train the model %s each on its own: its optimizer (%s) is not wrapped "
    "in tfscale.DistributedOptimizer, and no tfscale.DistributedGradientTape is used. Wrap the "
    "optimizer, or average parameters with tfscale.callbacks.ParameterAveraging. If single ranks "
    "are to train on their own, start with tfscale.init(backend='single')."
)
_told: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def trains_apart() -> bool:
    """Return whether a callback of the running `fit` wants ranks that exchange no gradients."""
    return any(getattr(callback, "trains_apart", False) for callback in callbacks_of_fit())


def unites_groups(callbacks: Iterable[Any]) -> bool:
    """Return whether some callback, or one inside of it, shows the average of the models."""
    every = [item for c in callbacks for item in (c, *getattr(c, "companions", ()))]
    return any(getattr(callback, "shows_averages", False) for callback in every)


def require_averages(model: Any) -> None:
    """Raise where the groups of local SGD would never be united.

    Args:
        model: Whose `fit` begins, on several ranks.

    Raises:
        ConfigError: No callback puts their average into the model.
    """
    if not isinstance(getattr(getattr(model, "optimizer", None), "strategy", None), LocalSGD):
        return
    if not unites_groups(callbacks_of_fit()):
        raise ConfigError(
            "Groups that train apart need a callback that starts them alike and unites their "
            "models before validation, saving and the end. Received: exchange=LocalSGD without "
            "one. Pass tfscale.callbacks.BroadcastGlobalVariablesCallback(0) to fit."
        )


def warn_if_unsynchronised(model: Any, has_exchanged: bool | None = None) -> None:
    """Warn, once per model and on one rank, if its ranks exchange nothing.

    Args:
        model: In a running `fit`.
        has_exchanged: Whether gradients were exchanged in this process; None before the first
            step, when a custom train_step may yet do so.
    """
    if not isinstance(model, keras.Model) or not runtime.is_initialized() or runtime.is_single():
        return
    if model in _told or runtime.rank() != 0:
        return
    optimizers = optimizers_of(model)
    is_wrapped = any(is_distributed(optimizer) for optimizer in optimizers)
    is_own_step = type(model).train_step is not keras.Model.train_step
    if is_wrapped or has_exchanged or (is_own_step and has_exchanged is None):
        return
    if trains_apart():
        return
    _told.add(model)
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    logger.warning(_TEXT, model.name, names)
