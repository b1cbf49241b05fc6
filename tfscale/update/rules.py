"""What Keras's update rules need to see of a variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.config import ConfigError
from tfscale.optimizers.lars import LARS
from tfscale.update.loss_scale import update_rule

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
# Nothing but the rate, the iteration and the weight decay changes from step to step. Nadam keeps a
# product over its steps; Adafactor asks whether the rate is a schedule.
_LATER = (*(rule for rule in ELEMENTWISE if rule is not _rules.Nadam), LARS, _rules.Lamb)


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


def why_not_later(optimizer: Any) -> str:
    """Return why parameters cannot be updated after their step, or an empty string.

    Args:
        optimizer: A Keras optimizer.
    """
    rule = update_rule(optimizer)
    if rule is not optimizer or rule.loss_scale_factor is not None:
        return "with loss scaling all gradients decide whether a step counts"
    if rule.gradient_accumulation_steps:
        return "gradients of several steps are added up"
    if rule.global_clipnorm is not None:
        return "clipping by the global norm needs all gradients"
    if rule.use_ema:
        return "the moving average needs all parameters"
    if type(rule) not in _LATER:
        return f"it is not known whether {type(rule).__name__} updates each variable by itself"
    return ""


def refuse_bypassed(optimizer: Any) -> None:
    """Refuse an optimizer whose own way to apply gradients would not be taken.

    Args:
        optimizer: A Keras optimizer.

    Raises:
        ConfigError: Its class overrides `apply_gradients`, and reduced gradients go to `apply`; or
            Keras computes with another library, whose gradients nobody would exchange.
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
