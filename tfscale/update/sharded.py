"""An optimizer that updates and keeps the state of this rank's own part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, ReduceOp, Scaling
from tfscale.config import ConfigError
from tfscale.exchange.clipping import clip
from tfscale.exchange.kept_state import KeptState
from tfscale.exchange.shard_state import ShardState
from tfscale.exchange.sharded import Sharded
from tfscale.exchange.shards import Shards
from tfscale.exchange.state_nodes import StateNodes
from tfscale.gradients import GradientReducer
from tfscale.parameters import futures
from tfscale.update.dense_routes import DenseRoutes
from tfscale.update.loss_scale import update_rule
from tfscale.update.rebuilding import exclude_pieces, forget_pieces, rebuilt, unbuilt
from tfscale.update.rules import require_keras, why_uncut


class ShardedUpdate:
    """Takes the place of an optimizer's own `apply`.

    The optimizer is built on the pieces of `Shards` instead of the model's variables. Its clipping
    and, for loss scaling, its look at whether gradients are finite are replaced by ones that ask
    all ranks.

    Attributes:
        shards: The own pieces; None until `build`.
        kept: Their optimizer's complete state, when it is gathered; None until `build`.
        nodes: The optimizer as tf.train.Checkpoint sees it; None until `build`.
        after_update: Called in the step, with what was updated and its gradients, before
            parameters are sent.
    """

    is_sharded = True

    def __init__(self, reducer: GradientReducer, strategy: Sharded) -> None:
        """Keep what does not change.

        Args:
            reducer: How gradients are reduced, and between whom.
            strategy: Options of the exchange.
        """
        self._reducer = reducer
        self._strategy = strategy
        self.shards: Shards | None = None
        self.kept: KeptState | None = None
        self.nodes: StateNodes | None = None
        self.after_update: Callable[[Sequence[Any], Sequence[Any]], None] | None = None
        self._routes = DenseRoutes(strategy, reducer)
        self._is_attached = False  # whoever reads a parameter waits for it
        self._shown: list[int] = []  # positions of the gradients that the optimizer sees

    @property
    def state(self) -> ShardState | None:
        """This rank's part of the optimizer's state; None until `build`."""
        return None if self.kept is None else self.kept.state

    def build(self, optimizer: Any, variables: Sequence[keras.Variable]) -> Any:
        """Build an optimizer on the pieces of variables.

        Args:
            optimizer: A Keras optimizer.
            variables: What it will train.

        Returns:
            The optimizer; one like it, with the same state, if it was built on whole variables.
        """
        with tf.init_scope():
            state = None
            if optimizer.built:
                state = [v.numpy() for v in optimizer.variables]
                variables = update_rule(optimizer)._trainable_variables
                optimizer = unbuilt(optimizer)
            self._build(optimizer, variables)
            if state is not None:
                assert self.kept is not None
                self.kept.load(state)
        return optimizer

    def _build(self, optimizer: Any, variables: Sequence[keras.Variable]) -> None:
        rule = update_rule(optimizer)
        require_keras(variables)
        shared = [v for v in variables if self._is_cut(v)]
        whole = frozenset(i for i, v in enumerate(shared) if why_uncut(rule, v))
        group = self._reducer.process_set.group()
        places = {id(v): i for i, v in enumerate(shared)}
        rows = [tuple(places[id(v)] for v in pair if id(v) in places) for pair in self._routes.rows]
        self.shards = Shards(shared, group, self._strategy, whole, rows)
        futures.make_futures(shared, self.shards.refresh)
        exclude_pieces(rule, self.shards)
        self._reducer.route(self._strategy.route(self.shards.exchange, self.shards.arrived))
        optimizer.build([self.target(v) for v in variables])
        rule._clip_gradients = lambda gradients: self._clip(rule, gradients)
        if rule is not optimizer:
            optimizer.check_finite = self._all_finite
        process_set = self._reducer.process_set
        state = ShardState(optimizer, rule, self.shards, process_set)
        self.kept = KeptState(state, process_set)
        self.nodes = StateNodes(self.kept)
        if rule is not optimizer:
            self.kept.serve(rule, first=len(optimizer._variables))

    def route(self, model: keras.Model, optimizer: Any) -> bool:
        """Choose which dense layers exchange activations and errors, before `build`.

        Args:
            model: All its layers are built.
            optimizer: What `build` is, or was, given.

        Returns:
            Whether layers go another way than before, so that `build` is due again.
        """
        rule = update_rule(optimizer)
        return self._routes.choose(model, lambda v: why_uncut(rule, v))

    def undo(self, optimizer: Any, variables: Sequence[keras.Variable]) -> Any:
        """Return an optimizer on whole variables, in the same state. Collective.

        Nobody waits for parameters afterwards, and this update must not be used any more. Each
        rank holds the complete state and its part of it for a moment.

        Args:
            optimizer: What `build` returned.
            variables: The model's, in the order of the optimizer.

        Raises:
            ExchangeError: Communication failed.
        """
        assert self.shards is not None and self.state is not None
        state = self.state.gather()
        futures.release(self.shards.variables)
        self._reducer.route(None)
        forget_pieces(update_rule(optimizer))
        return rebuilt(optimizer, variables, state)

    def attach(self, model: keras.Model) -> None:
        """Let steps end before the parameters have arrived.

        Args:
            model: The model whose variables are sharded.
        """
        if self.shards is None:
            return
        if not self._is_attached and self._strategy.overlap_forward:
            self._is_attached = True
            futures.attach(model, self.shards.variables, self.shards.refresh)

    def target(self, variable: keras.Variable) -> keras.Variable:
        """Return the variable that the optimizer updates instead of a model's."""
        if not self._is_cut(variable):
            return variable
        assert self.shards is not None
        return self.shards.pieces[self.shards.place(variable)]

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], skips: bool
    ) -> list[Any]:
        """Reduce gradients, update the own pieces, send them to all.

        Args:
            optimizer: What `build` built.
            gradients: This rank's, one per variable.
            variables: Some or all of those given to `build`.
            skips: The optimizer skips a step with an infinite gradient; all ranks agree on it.

        Returns:
            What was updated.
        """
        del skips
        shards = self.shards
        assert shards is not None
        self._routes.require_chosen()
        shards.arrived.clear()
        reduced = self._reducer.reduce(gradients, variables)
        chosen = [
            (g, self.target(v), self._position(v))
            for g, v in zip(reduced, variables, strict=True)
            if g is not None
        ]
        # Empty pieces cost ops and change nothing; one is left where a rank owns nothing else.
        useful = [c for c in chosen if c[2] < 0 or shards.owned(c[2])] or chosen[:1]
        self._shown = [position for _, _, position in useful]
        arrived = [] if tf.executing_eagerly() else shards.arrived[:1]
        targets = [target for _, target, _ in useful]
        own = [g for g, _, _ in useful]
        with tf.control_dependencies(arrived):
            optimizer.apply(own, targets)
        if self.after_update is not None:
            self.after_update(targets, own)
        updated = None if update_rule(optimizer).use_ema else frozenset(c[2] for c in chosen)
        _require_own(shards, updated)
        shards.publish(not self._is_attached, updated)
        return targets

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Let the optimizer set final values (averages, with use_ema). Collective.

        Args:
            optimizer: What `build` built.
            variables: The model's.
        """
        if self.shards is None or not update_rule(optimizer).use_ema:
            return
        optimizer.finalize_variable_values([self.target(v) for v in variables])
        self.shards.publish(waits=True)

    def _position(self, variable: Any) -> int:
        assert self.shards is not None
        return self.shards.place(variable) if self._is_cut(variable) else -1

    def _is_cut(self, variable: Any) -> bool:
        return not self._reducer.is_local(variable) and self._strategy.cuts(variable)

    def _clip(self, rule: Any, gradients: list[Any]) -> list[Any]:
        assert self.shards is not None
        return clip(rule, gradients, self._shown, self.shards)

    def _all_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Return whether the gradients of all ranks are finite."""
        assert self.shards is not None
        checks = [tf.reduce_all(tf.math.is_finite(g)) for g in gradients if g is not None]
        own = tf.cast(tf.reduce_all(tf.stack(checks)), tf.int32)
        call = Call(self.shards.group, "are gradients finite")
        (least,) = runtime.backend().allreduce([own], call, ReduceOp.MIN, Scaling())
        return tf.cast(least, tf.bool)


def _require_own(shards: Shards, updated: frozenset[int] | None) -> None:
    """Raise where parts of another optimizer would be overwritten with outdated values."""
    for bucket in shards.buckets_with(updated):
        for variable in (shards.variables[i] for i in bucket.indices):
            if futures.told_of(variable) != shards.refresh:
                raise ConfigError(
                    "Sharded optimizers must be built on variables of their own. Received: two for "
                    f"{variable.path}. Call build(variables) on each, before tfscale.prepare and "
                    "fit, or give all but one exchange='allreduce'."
                )
