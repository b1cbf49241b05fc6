"""Failures put into a training job, at a chosen rank, step and place.

model.compile(..., loss=spoiled(loss))
model.fit(..., callbacks=[*callbacks, fail_at(rank=1, step=5, kind="SIGKILL", place="step")])
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale

EXIT_CODE = 7
PLACES = ("step", "batch end", "epoch end")


class InjectedError(Exception):
    pass


def _raise() -> None:
    raise InjectedError(f"injected at rank {tfscale.rank()}")


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# What a rank does to itself. "NaN" is done to its loss instead.
ACTIONS: dict[str, Callable[[], None]] = {
    "exception": _raise,
    "os._exit": lambda: os._exit(EXIT_CODE),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "SIGTERM": _signal(signal.SIGTERM),
}

_factor: tf.Variable | None = None
_in_step: list[Callable[[], None]] = []


def _act_in_step() -> float:
    """Run what is due in the middle of a step: the forward pass is over, nothing is exchanged."""
    while _in_step:
        _in_step.pop()()
    return 1.0


def spoiled(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that `fail_at` can make NaN, or fail in."""
    global _factor
    _factor = tf.Variable(1.0, trainable=False)

    def wrapped(y: Any, prediction: Any) -> Any:
        value = loss(y, prediction)
        assert _factor is not None
        one = tf.py_function(_act_in_step, [], tf.float32)
        return value * tf.cast(_factor * tf.reshape(one, []), value.dtype)

    return wrapped


class fail_at(keras.callbacks.Callback):
    """Let one rank fail once."""

    def __init__(self, rank: int, step: int, kind: str, place: str = "step") -> None:
        super().__init__()
        assert kind in (*ACTIONS, "NaN"), kind
        assert place in PLACES, place
        self._is_here = rank == tfscale.rank()
        self._step, self._kind, self._place = step, kind, place
        self._n_steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._is_here or self._place != "step" or self._n_steps != self._step:
            return
        if self._kind == "NaN":
            assert _factor is not None
            _factor.assign(np.nan)
        else:
            _in_step.append(ACTIONS[self._kind])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._kind == "NaN" and _factor is not None:
            _factor.assign(1.0)
        if self._is_here and self._place == "batch end" and self._n_steps == self._step:
            ACTIONS[self._kind]()
        self._n_steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._is_here and self._place == "epoch end" and epoch == self._step:
            ACTIONS[self._kind]()
