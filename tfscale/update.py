"""What happens to gradients once they are reduced: the whole update, or this rank's part of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.exchange.sharded import Sharded
from tfscale.gradients import GradientReducer, first_exchanged
from tfscale.loss_scale import update_rule
from tfscale.sharded_update import ShardedUpdate, why_whole

logger = logging.getLogger("tfscale")


class WholeUpdate:
    """Every rank updates every variable, with equal gradients."""

    is_sharded = False
    shards = state = None

    def __init__(self, reducer: GradientReducer) -> None:
        """Keep how gradients are reduced."""
        self._reducer = reducer

    def build(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Build the optimizer on the model's variables, and return it."""
        optimizer.build(list(variables))
        return optimizer

    def attach(self, model: keras.Model) -> None:
        """Change nothing: steps end when all is updated."""

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], skips: bool
    ) -> Sequence[Any]:
        """Reduce gradients and apply them.

        Args:
            optimizer: A Keras optimizer.
            gradients: This rank's, one per variable.
            variables: What they belong to.
            skips: The optimizer skips a step with an infinite gradient.

        Returns:
            What was updated.
        """
        reduced = self._reducer.reduce(gradients, variables, skips_non_finite=skips)
        # A step that is given up because another rank stopped must change nothing, not even
        # `iterations`, so all of the update waits for the first gradient that is through.
        with tf.control_dependencies(first_exchanged(reduced)):
            optimizer.apply(reduced, variables)
        return variables

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Let the optimizer set final values."""
        optimizer.finalize_variable_values(variables)


def choose_update(reducer: GradientReducer, optimizer: Any) -> WholeUpdate | ShardedUpdate:
    """Return how an optimizer updates; needs a job that has begun.

    Args:
        reducer: How gradients are reduced, and between whom.
        optimizer: The Keras optimizer.
    """
    strategy = reducer.strategy
    if not isinstance(strategy, Sharded):
        return WholeUpdate(reducer)
    group = reducer.process_set.group()
    if group.size == 1 or group.rank < 0:
        return WholeUpdate(reducer)
    reason = why_whole(update_rule(optimizer))
    if reason:
        logger.info("Parameters are not sharded: %s. Gradients are allreduced.", reason)
        return WholeUpdate(reducer)
    return ShardedUpdate(reducer, strategy)
