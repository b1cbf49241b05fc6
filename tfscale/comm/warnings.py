"""Warn of ranks that train without exchange, and of metrics of one rank used as those of all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.internals.keras import before_first_fit
from tfscale.internals.optimizers import is_wrapped, optimizers_of
from tfscale.internals.stack import KerasPass
from tfscale.internals.traits import decider_without_averages, own_of, train_apart

logger = logging.getLogger("tfscale")

_APART = (
    "The ranks of this job train the model %s each on its own: its optimizer (%s) is not wrapped "
    "in tfscale.DistributedOptimizer, and no tfscale.DistributedGradientTape is used. Wrap the "
    "optimizer, or average parameters with tfscale.callbacks.ParameterAveraging. If single ranks "
    "are to train models of their own, start with tfscale.init(independent=True)."
)
_DECIDES = (
    "%s sees the metrics of each rank's own samples. Unless all ranks are given the same, they may "
    "decide differently: other learning rates, other best weights at the end. Give fit "
    "tfscale.callbacks.MetricAverageCallback(), too."
)
_EVALUATED = (
    "evaluate() returns the metrics of this rank's slices of GlobalBatches, not of all samples. "
    "Call it on all ranks with callbacks=[tfscale.callbacks.MetricAverageCallback()]."
)
_told: set[tuple[str, Any]] = set()
_is_independent = False  # whether ranks are to train models of their own


def warn_if_unsynchronised(
    model: Any, callbacks: Sequence[Any], has_exchanged: bool | None = None
) -> None:
    """Warn, once per model and on one rank, if its ranks exchange nothing in a running `fit`.

    `has_exchanged`: whether gradients were exchanged in this process; None before the first step,
    in which a custom train_step may do so.

    Raises:
        ConfigError: Variables are shared by the ranks (`is_shared`), so that they cannot train
            models of their own.
    """
    if not isinstance(model, keras.Model) or not _is_one_of_several():
        return
    optimizers = optimizers_of(model)
    some_wrapped = any(is_wrapped(optimizer) for optimizer in optimizers)
    is_own_step = type(model).train_step is not keras.Model.train_step
    if some_wrapped or has_exchanged or (is_own_step and has_exchanged is None):
        return
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    if shared := [v.path for v in model.trainable_variables if getattr(v, "is_shared", False)]:
        raise ConfigError(
            f"optimizer must be wrapped in tfscale.DistributedOptimizer where ranks share "
            f"{shared[0]}. Received: {names}, which leaves the other weights different on each "
            "rank. Compile the model with tfscale.DistributedOptimizer."
        )
    if not train_apart(callbacks):
        _warn_once((id(model), model.name), _APART, model.name, names)


def watch_first_fit(independent: bool) -> None:
    """Warn if the next `fit` exchanges nothing; with `independent` of nothing in this job."""
    global _is_independent
    _is_independent = independent
    before_first_fit(_warn_of_first_fit)


def _warn_of_first_fit(model: Any, callbacks: Any) -> None:
    listed = getattr(callbacks, "callbacks", callbacks) or ()
    if not own_of(listed if isinstance(listed, Iterable) else [listed]):  # these warn themselves
        warn_if_unsynchronised(model, ())


def warn_of_deciders(callbacks: Sequence[Any]) -> None:
    """Warn, once and on one rank, if callbacks decide by metrics of single ranks."""
    name = decider_without_averages(callbacks)
    if name is not None:
        _warn_once(None, _DECIDES, name)


def warn_of_evaluation(caller: KerasPass) -> None:
    """Warn, once and on one rank, of the metrics of an `evaluate` outside of `fit`."""
    is_of_all = any(callback.averages_metrics for callback in own_of(caller.callbacks))
    if caller.caller == "evaluate" and caller.fit is None and not is_of_all:
        _warn_once(None, _EVALUATED)


def _is_one_of_several() -> bool:
    return runtime.is_initialized() and not _is_independent and not runtime.is_single()


def _warn_once(about: Any, text: str, *names: str) -> None:
    if _is_one_of_several() and runtime.rank() == 0 and (text, about) not in _told:
        _told.add((text, about))
        logger.warning(text, *names)
