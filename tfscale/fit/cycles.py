"""Cycles of `backward_passes_per_step` that a stop ends before their last batch.

Nothing is exchanged in most batches of a cycle, so ranks that stop are at different ones. They go
back to the last batch that all have exchanged.
"""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfscale import objects, runtime
from tfscale.model_optimizers import accumulating

logger = logging.getLogger("tfscale")


def may_end_early(model: keras.Model | None) -> bool:
    """Return whether gradients of several batches are added up."""
    return bool(accumulating(model))


def state(model: keras.Model | None) -> list[int]:
    """Return what is equal on all ranks unless they are at different batches of a cycle."""
    counts = [optimizer.n_accumulated for optimizer in accumulating(model)]
    return [runtime.num_given_up(), *counts] if counts else []


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
    own: list[Any] = state(model)
    if own:
        settle(model, objects.allgather_object(own, name="end of training"))
