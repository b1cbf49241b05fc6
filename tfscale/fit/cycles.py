"""Cycles of `backward_passes_per_step` that a stop ends before their last batch.

Nothing is exchanged in most batches of a cycle, so nobody would be told of a stop there. It is put
off to the batch before an exchange, which the others then give up (`callbacks.stop_of_groups`), or
to the end of the epoch. After it all go back to the last batch that was exchanged.
"""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfscale.comm import objects, runtime
from tfscale.internals.optimizers import optimizers_of
from tfscale.optimizer.model_optimizers import accumulating

logger = logging.getLogger("tfscale")


def may_end_early(model: keras.Model | None) -> bool:
    """Return whether gradients of several batches are added up."""
    return bool(accumulating(model))


def may_stop(model: keras.Model) -> bool:
    """Return whether an exchange in the next batch will tell the others of a stop."""
    waiting = accumulating(model)
    return len(waiting) < len(optimizers_of(model)) or any(o.is_before_exchange for o in waiting)


def state(model: keras.Model | None, is_lockstep: bool) -> list[int]:
    """Return what is equal on all ranks unless they are at different batches of a cycle.

    Args:
        model: The model.
        is_lockstep: Ranks begin each batch together or not at all, so that none was given up.
    """
    counts = [optimizer.n_accumulated for optimizer in accumulating(model)]
    return [0 if is_lockstep else runtime.num_given_up(), *counts] if counts else []


def settle(model: keras.Model | None, every: list[list[int]]) -> None:
    """Drop the batches since the last exchange if ranks are not at the same one.

    Args:
        model: The model.
        every: `state` of each rank.
    """
    if all(own == every[0] for own in every):
        return
    for optimizer in accumulating(model):
        optimizer.drop_cycle()
    logger.info("Gradients of batches since the last exchange are dropped: ranks have stopped.")


def end(model: keras.Model | None) -> None:
    """Settle where training ends early. Collective."""
    own: list[Any] = state(model, is_lockstep=False)
    if own:
        settle(model, objects.allgather_object(own, name="end of training"))
