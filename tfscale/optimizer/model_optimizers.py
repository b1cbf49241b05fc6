"""The distributed optimizers of a model."""

from __future__ import annotations

import keras

from tfscale.internals.optimizers import optimizers_of, update_rule
from tfscale.optimizer.distributed import DistributedOptimizer, distributed_of
from tfscale.optimizer.state import KeptState


def distributed_optimizers(model: keras.Model | None) -> list[DistributedOptimizer]:
    """List the distributed optimizers of a model, in the order of `optimizers_of`."""
    found = [] if model is None else [distributed_of(o) for o in optimizers_of(model)]
    return [optimizer for optimizer in found if optimizer is not None]


def sharded_states(model: keras.Model) -> list[KeptState]:
    """Return the complete state of each optimizer whose state the ranks share."""
    found = [optimizer.kept_state for optimizer in distributed_optimizers(model)]
    return [kept for kept in found if kept is not None]


def accumulating(model: keras.Model | None) -> list[DistributedOptimizer]:
    """List the optimizers of a model that add up gradients of several batches."""
    return [o for o in distributed_optimizers(model) if o.accumulator is not None]


def passes_per_update(model: keras.Model) -> int:
    """Return how many batches each optimizer of a model has seen when all have updated something.

    More than 1 with `backward_passes_per_step` or Keras's `gradient_accumulation_steps`.
    """
    own = [o.accumulator.passes for o in accumulating(model) if o.accumulator is not None]
    keras_own = [update_rule(o).gradient_accumulation_steps or 1 for o in optimizers_of(model)]
    return max([1, *own, *keras_own])
