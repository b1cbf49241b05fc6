"""Keras optimizers made anew, to be built on other variables than before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm.backends.base import raw_variable
from tfscale.exchange.shards import Shards
from tfscale.model_optimizers import config_of
from tfscale.update.loss_scale import scaled_by


def unbuilt(optimizer: Any) -> Any:
    """Return an optimizer with the same settings, the same schedule if any, and no state."""
    config, inner = config_of(optimizer), scaled_by(optimizer)
    if inner is not None:
        return type(optimizer)(unbuilt(inner), **config)
    if not isinstance(optimizer._learning_rate, keras.Variable):
        config["learning_rate"] = optimizer._learning_rate  # itself: it may have a state
    other = type(optimizer).from_config(config)
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(other, name, getattr(optimizer, name))
    return other


def rebuilt(
    optimizer: Any, variables: Sequence[keras.Variable], state: Sequence[np.ndarray]
) -> Any:
    """Return an optimizer with the same settings on other variables.

    Args:
        optimizer: A Keras optimizer.
        variables: What the new one trains.
        state: A value for each of the new one's variables.
    """
    with tf.init_scope():
        other = unbuilt(optimizer)
        other.build(list(variables))
        for variable, value in zip(other.variables, state, strict=True):
            variable.assign(value)
    return other


def exclude_pieces(rule: Any, shards: Shards) -> None:
    """Let pieces decay where their variables would, by the rule's own word.

    A piece lacks the name of its variable's layer, by which Keras may know the variable.

    Args:
        rule: Built on the pieces later.
        shards: They.
    """
    ask = type(rule)._use_weight_decay
    pairs = zip(shards.pieces, shards.variables, strict=True)
    whole = {rule._var_key(raw_variable(piece)): variable for piece, variable in pairs}

    def use_weight_decay(variable: Any) -> bool:
        known = whole.get(rule._var_key(raw_variable(variable)))
        if known is not None:  # rules ask with Keras's variables or with TensorFlow's
            variable = known if isinstance(variable, keras.Variable) else raw_variable(known)
        return bool(ask(rule, variable))

    rule.__dict__["_use_weight_decay"] = use_weight_decay


def forget_pieces(rule: Any) -> None:
    """Undo `exclude_pieces`: Keras knows variables by `id`, which others may get.

    Args:
        rule: Built on the pieces.
    """
    rule.__dict__.pop("_use_weight_decay", None)
