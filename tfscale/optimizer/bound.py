"""A Keras optimizer bound to an exchange: the ranks, the strategy, and what this rank updates."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.exchange.base import Exchange
from tfscale.exchange.executor import Executor, Request
from tfscale.exchange.residuals import pending_change
from tfscale.exchange.states import Saved, SavedStates, Scope, Stateful, saved_together
from tfscale.exchange.tables import table_of
from tfscale.internals import optimizers as internals
from tfscale.internals.keras import raw_variable
from tfscale.optimizer import futures
from tfscale.optimizer.nonfinite import NonFinite
from tfscale.optimizer.rules import (
    ELEMENTWISE,
    on_pieces,
    require_keras,
    warn_of_sums,
    why_uncut,
    why_whole,
)
from tfscale.optimizer.state import KeptState, Slots, n_bytes
from tfscale.optimizer.table_rules import refuse_unfit
from tfscale.trace.events import stamp_updates

logger = logging.getLogger("tfscale")


@dataclass(frozen=True, eq=False)
class Bound:
    """A Keras optimizer bound to an exchange.

    It goes through three states, each an object of its own: as the user gave it (`of`), adapted to
    the ranks of the job (`among`), and built on what this rank updates (`built_on`). Another
    strategy, other groups or another cut begin again with `among`; `DistributedOptimizer._bind`
    takes the optimizer's state along.

    Attributes:
        optimizer: The Keras optimizer, perhaps with loss scaling around its update rule.
        strategy: The exchange among the ranks with equal weights, as the user or the planner chose
            it. `executor.strategy` is what runs: other than this if nothing can be cut.
        executor: The exchange of gradients and parameters.
        nonfinite: The policy for gradients that are not finite.
        is_ready: Whether the strategy is adapted to the ranks.
        is_compared: Whether the ranks have compared their first weights.
        waits: Whether a step waits for parameters that it has sent; else every read of one does.
        kept: Access to the complete state; None unless parameters are cut.
        groups: The groups of local SGD (`local_sgd.groups.Groups`); None without.
        average: The average of groups that train apart (`local_sgd.averages.GroupAverage`), or
            None.
    """

    optimizer: Any
    strategy: Exchange
    executor: Executor
    nonfinite: NonFinite
    is_ready: bool = False
    is_compared: bool = False
    waits: bool = True
    kept: KeptState | None = None
    groups: Any = None
    average: Any = None

    @staticmethod
    def of(optimizer: Any, request: Request, nonfinite: NonFinite) -> Bound:
        """Bind an optimizer to what a user asks for, before anything is known of the ranks."""
        executor = Executor.of(request, request.strategy)
        return Bound(optimizer, request.strategy, executor, nonfinite)

    def for_another(self, optimizer: Any) -> Bound:
        """Bind another optimizer to what the user has asked for."""
        policy = NonFinite(self.nonfinite.policy)
        return Bound.of(optimizer, self.executor.request.copy(), policy)

    def fresh(self) -> Any:
        """Return an optimizer without state if a copy would hold parts of it, else None."""
        return internals.unbuilt(self.optimizer) if self.is_cut else None

    def among(self, strategy: Exchange, groups: Any = None, may_cut: bool = True) -> Bound:
        """Return the optimizer bound to a strategy among this job's ranks, not built.

        Args:
            strategy: The exchange, of all ranks or inside of the groups.
            groups: Groups of ranks; None keeps those that there are.
            may_cut: Whether the strategy may cut parameters if ranks and update rule allow it.
        """
        groups = groups or self.groups
        process_set = groups.process_set if groups else self.executor.request.process_set
        is_cut = may_cut and self._may_cut(strategy, process_set)
        whole = replace(self.executor, process_set=process_set, shards=None, table=())
        executor = replace(whole, strategy=strategy if is_cut else strategy.whole())
        adapted = replace(self, strategy=strategy, executor=executor, groups=groups)
        return replace(adapted, is_ready=True, waits=True, kept=None)

    def _may_cut(self, strategy: Exchange, process_set: runtime.ProcessSet) -> bool:
        """Return whether a strategy can cut parameters; say why not if it is meant to."""
        group = process_set.group()
        if not strategy.is_sharding or group.size == 1 or group.rank < 0:
            return False
        reason = why_whole(self.rule)
        if reason:
            # A warning, which Python shows, as the exchange is not the requested one; once per job.
            level = logging.WARNING if runtime.rank() == 0 else logging.INFO
            logger.log(level, "Parameters are not sharded: %s. Gradients are allreduced.", reason)
        return not reason

    def built_on(
        self, variables: Sequence[Any], state: Sequence[np.ndarray] | None = None
    ) -> Bound:
        """Return the optimizer built on what this rank updates of variables. Collective.

        Args:
            variables: The model's, equal on all ranks, in the order of the optimizer.
            state: Complete state of an optimizer that was built before, to continue with; None
                builds one that is not built yet.
        """
        optimizer, rule, executor, kept = self.optimizer, self.rule, self.executor, None
        with tf.init_scope():
            unlisted = {} if state is None else internals.unlisted_state(rule)
            if state is not None:
                internals.unbuild(optimizer)
            if executor.strategy.is_sharding:
                require_keras(variables)
                executor = executor.cut(variables, lambda v: why_uncut(rule, v))
            shards = executor.shards
            optimizer.build(list(variables) if shards is None else shards.targets)
            if shards is not None:
                futures.make_futures(shards.cut, shards.refresh)
                kept = KeptState(optimizer, rule, shards, executor.process_set)
        bound = replace(self, executor=executor, kept=kept)
        if self.groups is not None and self.groups.is_apart and self.average is None:
            bound = replace(bound, average=self.groups.average(optimizer, executor))
        if state is not None:
            bound._load(state, unlisted)
        return bound

    def _load(self, state: Sequence[np.ndarray], unlisted: dict[str, np.ndarray]) -> None:
        """Load complete state into the optimizer, which was built again."""
        with tf.init_scope():
            for name, value in unlisted.items():
                getattr(self.rule, name).assign(value)
            if self.kept is not None:
                self.kept.load(state)
                return
            for variable, value in zip(self.optimizer.variables, state, strict=True):
                variable.assign(value)

    def attached(self, model: keras.Model) -> Bound:
        """Return it with a prepared model, whose reads wait for parameters if its steps do not."""
        shards = self.executor.shards
        if shards is None or self.strategy.waits_for_gathers or not self.waits:
            return self
        futures.attach(model, shards.cut, shards.refresh)
        return replace(self, waits=False)

    def with_outcome(self, strategy: Exchange) -> Bound:
        """Return it with an equal strategy that has the measured outcome of its plan."""
        is_as_chosen = self.executor.strategy == self.strategy
        running = strategy if is_as_chosen else strategy.whole()
        return replace(self, strategy=strategy, executor=replace(self.executor, strategy=running))

    def close(self) -> None:
        """Make the variables ordinary, before the optimizer is built on others."""
        shards = self.executor.shards
        if shards is not None and self.kept is not None:
            futures.release(shards.cut)
            self.kept.stop_serving()
            internals.set_holder(self.rule, None)

    # What is bound

    @property
    def rule(self) -> Any:
        """The optimizer that holds the update rule, inside any loss scaling."""
        return internals.update_rule(self.optimizer)

    @property
    def is_cut(self) -> bool:
        """Whether parameters and state are divided among the ranks."""
        return self.executor.shards is not None

    @property
    def is_cutting(self) -> bool:
        """Whether the exchange divides parameters among the ranks, now or when it is built."""
        return self.is_ready and self.executor.strategy.is_sharding

    @property
    def is_built(self) -> bool:
        """Whether the optimizer has its state, for what this rank updates."""
        is_averaged = self.groups is None or not self.groups.is_apart or self.average is not None
        is_as_planned = self.is_cut or not self.executor.strategy.is_sharding
        return self.optimizer.built and is_as_planned and is_averaged

    @property
    def variables(self) -> list[Any]:
        """The model's variables for which the optimizer was built."""
        shards = self.executor.shards
        # Keras 3.10's LossScaleOptimizer does not know what its inner optimizer trains.
        trained = internals.trained_by(self.rule)
        if shards is None:
            return trained
        whole_of = {id(t): v for t, v in zip(shards.targets, shards.variables, strict=True)}
        return [whole_of.get(id(v), v) for v in trained]

    @property
    def process_set(self) -> runtime.ProcessSet:
        """The ranks that take part; all of them with local SGD."""
        return self.executor.process_set if self.groups is None else runtime.global_process_set

    @property
    def is_waiting_for_groups(self) -> bool:
        """Whether there are groups that begin to train separately later (`LocalSGD(start=...)`)."""
        return self.groups is not None and not self.groups.is_apart

    def why_not_cut(self, model: keras.Model) -> str:
        """Return why parameters that are not cut yet cannot be, or an empty string."""
        if self.executor.strategy.is_sharding:
            return ""
        if self.groups is not None or not internals.trains_all(model):
            return "the model's parameters are not updated by one optimizer alone"
        if self.executor.observers:
            return "gradients are looked at while they are exchanged"
        if runtime.backend().name == "horovod":
            return "Horovod moves the bytes"
        return why_whole(self.rule)

    def memory_report(self) -> dict[str, int]:
        """Return the bytes of state, parameters and residuals; see `DistributedOptimizer`."""
        state, shards = n_bytes(self.optimizer.variables), self.executor.shards
        lossy = [r for r in (self.executor.residuals, self.average and self.average.residuals) if r]
        return {
            "state": state,
            "complete_state": self.kept.n_bytes if self.kept else state,
            "parameters": n_bytes(shards.pieces.values()) if shards else 0,
            "residuals": sum(n_bytes(residuals.variables) for residuals in lossy),
        }

    # Checkpoints

    @property
    def _states(self) -> list[Stateful]:
        """The parts that have a state between steps, in the order in which they are restored."""
        slots = Slots(self.optimizer, self.kept, self.executor.shards)
        return [slots, *(s for s in (self.average, self.executor.residuals) if s is not None)]

    def saved(self, scope: Scope) -> Saved:
        """Copy this rank's part of the optimizer's state, and what the exchange keeps."""
        return saved_together(self._states, scope)

    def restored(self, saved: SavedStates) -> None:
        """Restore what `saved` has copied on all ranks. Collective."""
        for state in self._states:
            state.restored(saved)
        if self.average is None and not saved.is_end:
            self._apply_pending(saved)

    def _apply_pending(self, saved: SavedStates) -> None:
        """Apply what groups of an earlier job had not sent in averages: there are none now."""
        for i, weight in enumerate(saved.scope.weights):
            pending = pending_change(saved, i, int(np.prod(weight.shape)))
            if pending is not None:
                value = np.asarray(weight.numpy())
                weight.assign(value + pending.reshape(value.shape).astype(value.dtype))

    # A step

    def step(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Reduce gradients, update variables with them, and send what has changed. Collective.

        `gradients` are this rank's own, one or None for each of the model's `variables`.
        """
        rule, executor = self.rule, self.executor
        self._refuse_local(rule, variables)
        self.refuse_tables(internals.trained_by(rule))
        if runtime.rank() == 0 and executor.options.repeated_indices == "sum":
            warn_of_sums(rule, gradients)
        reduced = executor.reduce(gradients, variables)
        # A step that is given up because another rank stopped must change nothing, not even
        # `iterations`, so the whole update waits for the first reduced gradient.
        with tf.control_dependencies(reduced.arrived), on_pieces(self.optimizer, reduced, executor):
            self.nonfinite.apply(self.optimizer, reduced, gradients, variables, executor)
            _follow(reduced.targets)
        if self.average is not None:
            self.average.after_update(reduced, gradients)
        with tf.control_dependencies(reduced.arrived):
            self._publish([v for g, v in zip(gradients, variables, strict=True) if g is not None])
        stamp_updates(reduced.targets)

    def refuse_tables(self, variables: Sequence[Any]) -> None:
        """Raise a ConfigError if this optimizer cannot train the tables among some variables."""
        is_apart = self.groups is not None
        refuse_unfit(self.rule, variables, ELEMENTWISE, is_apart, self.executor.process_set)

    def _refuse_local(self, rule: Any, variables: Sequence[Any]) -> None:
        """Raise an error if ranks would scale gradients by norms that differ."""
        is_local = any(self.executor.is_local(v) and table_of(v) is None for v in variables)
        if rule.global_clipnorm and self.process_set.size() > 1 and is_local:
            raise ConfigError(
                "global_clipnorm needs equal gradients on all ranks. Received: "
                f"global_clipnorm={rule.global_clipnorm} with local layers or variables. Use "
                "clipnorm, which looks at each gradient by itself."
            )

    def _publish(self, trained: Sequence[Any]) -> None:
        """Send the parameters that this rank has updated. Collective.

        Other buckets must not be sent: their gathers depend on no batch, and TensorFlow runs such
        ops also in a step that finds no data. With averages all are sent: they change every piece,
        and wait for a gradient.
        """
        shards = self.executor.shards
        if shards is None:
            return
        has_averages = self.rule.use_ema or self.average is not None
        updated = None if has_averages else {shards.position(variable) for variable in trained}
        for variable in (
            shards.variables[i] for b in shards.buckets_with(updated) for i in b.indices
        ):
            # Otherwise outdated values would overwrite the parts of another optimizer.
            if futures.assignment_hook(variable) != shards.refresh:
                raise ConfigError(
                    f"{variable.path} must belong to one sharded optimizer. Received: two. Call "
                    "build(variables) on each, before tfscale.prepare and fit, or give all but "
                    "one exchange='allreduce'."
                )
        self.executor.publish(updated, waits=self.waits)

    def finish(self, variables: Sequence[Any]) -> None:
        """Set the final values of variables at the end of `fit`, as Keras does. Collective."""
        has_averages, shards = self.rule.use_ema, self.executor.shards
        if shards is None:
            self.optimizer.finalize_variable_values(variables)
        elif has_averages:
            targets = [shards.targets[shards.position(v)] for v in variables]
            self.optimizer.finalize_variable_values(targets)
            self.executor.publish()
        else:
            shards.publish_exact()
        if self.average is not None and has_averages:
            self.average.average_now()


def _follow(variables: Sequence[Any]) -> None:
    """Refresh the pieces of another optimizer that has cut the same variables."""
    for variable in variables:
        on_assign = futures.assignment_hook(variable)
        if on_assign is not None:
            on_assign(variable, raw_variable(variable).read_value(), None)
