"""Keras optimizers made anew, to be built on other variables than before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.exchange.shards import Shards
from tfscale.update.loss_scale import scaled_by


def unbuilt(optimizer: Any) -> Any:
    """Return an optimizer with the same settings, the same schedule if any, and no state."""
    config, inner = optimizer.get_config(), scaled_by(optimizer)
    if inner is not None:
        del config["inner_optimizer"]
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
    """Let no weight decay where it was excluded for a variable given as such.

    Exclusion by name needs nothing: a piece has its variable's name.

    Args:
        rule: Built on the pieces later.
        shards: They.
    """
    excluded: set[Any] = getattr(rule, "_exclude_from_weight_decay", set())
    pairs = zip(shards.variables, shards.pieces, strict=True)
    excluded |= {rule._var_key(p) for v, p in pairs if rule._var_key(v) in excluded}


def forget_pieces(rule: Any, shards: Shards) -> None:
    """Undo `exclude_pieces`: Keras knows variables by `id`, which others may get.

    Args:
        rule: Built on the pieces.
        shards: They.
    """
    excluded: set[Any] = getattr(rule, "_exclude_from_weight_decay", set())
    excluded -= {rule._var_key(piece) for piece in shards.pieces}
