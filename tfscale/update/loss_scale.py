"""Loss scaling belongs inside of the distributed optimizer; this finds it outside."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import keras

from tfscale.config import ExchangeError

_MAX_FRAMES = 24  # between LossScaleOptimizer.apply and ours, tf.cond included


def scaled_by(scaler: Any) -> Any:
    """Return the optimizer that a LossScaleOptimizer wraps, or None for other objects."""
    is_scaler = type(scaler) is keras.optimizers.LossScaleOptimizer
    return scaler.inner_optimizer if is_scaler else None


def update_rule(optimizer: Any) -> Any:
    """Return the optimizer that holds the update rule, below loss scaling."""
    inner = scaled_by(optimizer)
    return optimizer if inner is None else update_rule(inner)


def refuse_outer(distributed: type) -> None:
    """Raise where a LossScaleOptimizer calls us: it skips steps by what one rank sees alone.

    Args:
        distributed: The class of our optimizer.

    Raises:
        ExchangeError: The optimizer that calls this is wrapped by a LossScaleOptimizer.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        if type(scaled_by(frame.f_locals.get("self"))) is distributed:
            raise ExchangeError(
                "Loss scaling must be inside of the distributed optimizer, or ranks that see an "
                "infinite gradient skip the exchange and the others wait for them. Received: "
                "LossScaleOptimizer(DistributedOptimizer(...)). Write DistributedOptimizer("
                "LossScaleOptimizer(...)), pass auto_scale_loss=False to compile(), or let "
                "tfscale.prepare(model) or any tfscale callback repair it."
            )
        frame = frame.f_back
