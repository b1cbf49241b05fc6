"""What happens to gradients once they are reduced: the whole update, or this rank's part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import raw_variable
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.exchange.sharded import Sharded
from tfscale.exchange.strategies import resolve
from tfscale.gradients import GradientReducer, first_exchanged
from tfscale.parameters import futures
from tfscale.update.delayed_dense import DelayedDense
from tfscale.update.local import LocalUpdate
from tfscale.update.loss_scale import update_rule
from tfscale.update.rules import why_whole
from tfscale.update.sharded import ShardedUpdate

logger = logging.getLogger("tfscale")


class WholeUpdate:
    """Every rank updates every variable, with equal gradients."""

    is_sharded = False
    shards = state = kept = nodes = None

    def __init__(self, reducer: GradientReducer) -> None:
        """Keep how gradients are reduced."""
        self._reducer = reducer
        self._delayed = DelayedDense()
        self.after_update: Callable[[Sequence[Any], Sequence[Any]], None] | None = None

    def build(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Build the optimizer on the model's variables, and return it."""
        optimizer.build(list(variables))
        return optimizer

    def attach(self, model: keras.Model) -> None:
        """Change nothing: steps end when all is updated."""

    def delay(self, model: keras.Model, optimizer: Any, why_not: str) -> bool:
        """Let dense layers be updated when they are read next, if the strategy asks for it.

        Args:
            model: Its layers have been given their calls.
            optimizer: The Keras optimizer that trains it.
            why_not: Why that cannot be, or an empty string.

        Returns:
            Whether functions must be traced anew.
        """
        if getattr(self._reducer.strategy, "delay_dense_update", False) is not True:
            return False
        return self._delayed.attach(model, optimizer, why_not)

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
        split = self._delayed.split(reduced, variables)
        now, updated = [reduced[i] for i in split.now], [variables[i] for i in split.now]
        # A step that is given up because another rank stopped must change nothing, not even
        # `iterations`, so all of the update waits for the first gradient that is through.
        sent = [g for g, v in zip(now, updated, strict=True) if not self._reducer.is_local(v)]
        with tf.control_dependencies(first_exchanged(sent) or split.arrived):
            split.keep()
            if now or not split.later:
                optimizer.apply(now, updated)
                _tell_of(updated)
            else:
                optimizer.iterations.assign_add(1)
        if self.after_update is not None:
            chosen = [(v, g) for v, g in zip(updated, now, strict=True) if g is not None]
            self.after_update([v for v, _ in chosen], [g for _, g in chosen])
        return updated

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Let the optimizer set final values."""
        optimizer.finalize_variable_values(variables)


def _tell_of(variables: Sequence[Any]) -> None:
    """Tell another optimizer that has cut the same variables: its pieces follow."""
    for variable in variables:
        on_assign = futures.told_of(variable)
        if on_assign is not None:
            on_assign(variable, raw_variable(variable).read_value())


Update = WholeUpdate | ShardedUpdate | LocalUpdate


def choose_update(reducer: GradientReducer, optimizer: Any) -> Update:
    """Return how an optimizer updates; needs a job that has begun. Collective for local SGD.

    Args:
        reducer: How gradients are reduced, and between whom.
        optimizer: The Keras optimizer.

    Raises:
        ConfigError: The groups of local SGD do not fit the ranks.
    """
    strategy = reducer.strategy
    if isinstance(strategy, LocalSGD) and not runtime.is_single():
        return LocalUpdate(reducer, strategy, lambda: choose_update(reducer, optimizer))
    if isinstance(strategy, LocalSGD):
        reducer.strategy = strategy = resolve(strategy.within)
    if not isinstance(strategy, Sharded):
        return WholeUpdate(reducer)
    group = reducer.process_set.group()
    if group.size == 1 or group.rank < 0:
        return WholeUpdate(reducer)
    reason = why_whole(update_rule(optimizer))
    if reason:
        # Another exchange than was asked for, so that Python shows it, once per job.
        level = logging.WARNING if runtime.rank() == 0 else logging.INFO
        logger.log(level, "Parameters are not sharded: %s. Gradients are allreduced.", reason)
        return WholeUpdate(reducer)
    return ShardedUpdate(reducer, strategy)
