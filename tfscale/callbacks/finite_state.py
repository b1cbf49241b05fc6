"""What layers keep beside their weights stays finite, where steps with NaN are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.checkpoints.state import non_trainable_state
from tfscale.internals.keras import replace_train_step
from tfscale.optimizer.distributed import distributed_optimizers

_Pairs = Sequence[tuple[keras.Variable, tf.Tensor]]


def keep_finite(model: keras.Model) -> None:
    """Let the training steps of a model put back moving statistics that they have spoiled.

    A forward pass moves them before anybody can look at its gradients, and of an average with NaN
    nothing finite is left. On a rank where that happens all of them become what they were before
    the step; what other ranks saw in it was sound. Needed with `nonfinite="skip"` only, and nothing
    is done to other models. To look costs a small op for each of them; no step copies any.

    Args:
        model: Compiled. Its step is wrapped once, and traced anew.
    """
    if not _skips(model) or getattr(model.train_step, "keeps_finite", False):
        return
    step = model.train_step

    def train_step(data: Any) -> Any:
        if not _skips(model):  # it was compiled with another optimizer since
            return step(data)
        before = [(v, tf.identity(v.value)) for v in non_trainable_state(model)]
        logs = step(data)
        if before:
            _put_back(before)
        return logs

    train_step.keeps_finite = True  # type: ignore[attr-defined]
    replace_train_step(model, train_step)


def _skips(model: keras.Model) -> bool:
    return any(o.nonfinite == "skip" for o in distributed_optimizers(model))


def _put_back(before: _Pairs) -> None:
    finite = tf.reduce_all([_is_finite(variable.value) for variable, _ in before])
    if tf.executing_eagerly():
        if not bool(finite):
            _put_back_spoiled(before)
        return
    tf.cond(finite, lambda: tf.constant(0), lambda: _put_back_spoiled(before))


def _put_back_spoiled(before: _Pairs) -> tf.Tensor:
    """Leave what has always been infinite, such as a minimum that nothing was seen of yet."""
    now = [tf.identity(variable.value) for variable, _ in before]
    is_spoiled = tf.reduce_any(
        [_is_finite(old) & ~_is_finite(new) for (_, old), new in zip(before, now, strict=True)]
    )
    for (variable, old), new in zip(before, now, strict=True):
        variable.assign(tf.where(is_spoiled, old, new))
    return tf.constant(0)


def _is_finite(value: Any) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(value))
