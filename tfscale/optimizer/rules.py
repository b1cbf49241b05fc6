"""Update rules of Keras: which of them can work on parts of variables, and which are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.config import ConfigError, ExchangeError
from tfscale.internals.optimizers import has_outer_scaler, update_rule
from tfscale.optimizer.lars import LARS

_rules = keras.optimizers
# The update of a value depends on that value's gradient and state alone.
ELEMENTWISE = (
    _rules.SGD,
    _rules.RMSprop,
    _rules.Adam,
    _rules.AdamW,
    _rules.Adadelta,
    _rules.Adagrad,
    _rules.Adamax,
    _rules.Nadam,
    _rules.Ftrl,
    _rules.Lion,
)
# The update needs all of a variable, but of no other.
LAYERWISE = (LARS, _rules.Lamb, _rules.Adafactor, _rules.Muon)


def why_whole(rule: Any) -> str:
    """Return why an update rule cannot work on parts of the parameters, or an empty string."""
    if type(rule) in ELEMENTWISE + LAYERWISE:
        return ""
    return f"it is not known whether {type(rule).__name__} can update parts of them"


def why_uncut(rule: Any, variable: Any) -> str:
    """Return why one rank must own all of a variable, or an empty string."""
    if type(rule) in LAYERWISE:
        return f"{type(rule).__name__} needs whole kernels"
    return "" if variable.constraint is None else "a constraint needs the whole kernel"


def refuse_bypassed(optimizer: Any) -> None:
    """Refuse an optimizer whose own way to apply gradients would not be taken.

    Args:
        optimizer: A Keras optimizer.

    Raises:
        ConfigError: Its class overrides `apply_gradients`, and reduced gradients go to `apply`; or
            Keras computes with another library, whose gradients would not be exchanged.
    """
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            "Keras must compute with TensorFlow. Received: the Keras backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    for each in (optimizer, update_rule(optimizer)):
        own = getattr(type(each), "apply_gradients", None)
        if own not in (None, keras.optimizers.Optimizer.apply_gradients):
            raise ConfigError(
                "Reduced gradients are given to an optimizer's `apply`, as Keras 3 does. Received: "
                f"{type(each).__name__}, which overrides `apply_gradients`. Override `apply` "
                "instead."
            )


def require_keras(variables: Sequence[Any]) -> None:
    """Require variables whose readers can be made to wait.

    Raises:
        ConfigError: There are others.
    """
    others = [v for v in variables if not isinstance(v, keras.Variable)]
    if others:
        raise ConfigError(
            "Sharded parameters must be variables of Keras. Received: a "
            f"{type(others[0]).__name__}, {others[0].name}. Use keras.Variable, or "
            "exchange='allreduce'."
        )


def refuse_outer_scaler(distributed: type) -> None:
    """Raise where a LossScaleOptimizer calls us: it skips steps by what one rank sees alone.

    Args:
        distributed: The class of our optimizer.

    Raises:
        ExchangeError: The optimizer that calls this is wrapped by a LossScaleOptimizer.
    """
    if has_outer_scaler(distributed):
        raise ExchangeError(
            "Loss scaling must be inside of the distributed optimizer, or ranks that see an "
            "infinite gradient skip the exchange and the others wait for them. Received: "
            "LossScaleOptimizer(DistributedOptimizer(...)). Write DistributedOptimizer("
            "LossScaleOptimizer(...)), pass auto_scale_loss=False to compile(), or let "
            "tfscale.prepare(model) or any tfscale callback repair it."
        )
