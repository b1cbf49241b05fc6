"""With whom, and how, a distributed optimizer shares its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.comm.runtime import ProcessSet
from tfscale.config import ConfigError
from tfscale.exchange.base import Exchange
from tfscale.exchange.sharded import Sharded
from tfscale.model_optimizers import trains_all
from tfscale.update.loss_scale import update_rule
from tfscale.update.rules import why_whole
from tfscale.update.whole import WholeUpdate, choose_update


class Sharing:
    """What a `DistributedOptimizer` answers when it is asked about ranks and strategy."""

    __slots__ = ()  # `vars` of the proxy stays that of the wrapped optimizer

    __wrapped__: Any
    _self_reducer: Any
    _self_update: Any
    _self_accumulator: Any
    _self_nonfinite: Any
    _self_local_layers: list[Any]
    wire: Callable[[keras.Model], bool]
    build: Callable[[Sequence[Any]], None]

    def _update(self) -> Any:
        if self._self_update is None:
            self._self_update = choose_update(self._self_reducer, self.__wrapped__)
        return self._self_update

    def _built_update(self, variables: list[Any]) -> Any:
        update = self._update()
        if not self.__wrapped__.built or (update.shards is None and update.is_sharded):
            self.build(variables)
        return update

    def _built_for(self) -> list[Any]:
        """Return the model's variables that the optimizer was built for."""
        shards = self._update().shards
        # Keras 3.10's LossScaleOptimizer does not know what its inner optimizer trains.
        trained = update_rule(self.__wrapped__)._trainable_variables
        if shards is None:
            return list(trained)
        places = {id(piece): i for i, piece in enumerate(shards.pieces)}
        return [shards.variables[places[id(v)]] if id(v) in places else v for v in trained]

    def _change_strategy(self, strategy: Exchange) -> bool:
        """Go on with another strategy, parameters and state as they are. Collective.

        Returns:
            Whether the step must be traced anew: not where only an outcome is known now.
        """
        if strategy == self._self_reducer.strategy:
            self._self_reducer.strategy = strategy
            return False
        is_sharded = self._update().is_sharded
        self.undo_shards()
        model = self._self_reducer.change_strategy(strategy)
        if is_sharded or isinstance(strategy, Sharded):
            self._self_update = None
        if model is not None:
            self.wire(model)
        return True

    @property
    def n_accumulated(self) -> int:
        """Batches whose gradients are added up since the last exchange; 0 without cycles."""
        return 0 if self._self_accumulator is None else int(self._self_accumulator.n_waiting)

    @property
    def is_before_exchange(self) -> bool:
        """Whether the next batch's gradients are exchanged."""
        accumulator = self._self_accumulator
        return accumulator is None or accumulator.is_before_exchange

    def drop_cycle(self) -> None:
        """Take back the batches of a cycle that has not ended."""
        if self._self_accumulator is not None:
            n_dropped = self._self_accumulator.drop_cycle()
            update_rule(self.__wrapped__)._iterations.assign_sub(n_dropped)

    def begin_cycle(self, n_lost: int) -> None:
        """Begin a cycle where a run goes on without the sums of the one it was in.

        Args:
            n_lost: Batches that `iterations` counts and whose gradients are lost.
        """
        self._self_accumulator.drop_cycle()
        update_rule(self.__wrapped__)._iterations.assign_sub(n_lost)

    def undo_shards(self) -> None:
        """Let what is wrapped be an optimizer of whole variables again. Collective.

        Raises:
            ConfigError: Groups of local SGD hold its state.
        """
        update = self._update()
        if not update.is_sharded or update.shards is None:
            return
        if not hasattr(update, "undo"):
            raise ConfigError(
                "Local SGD needs loss scaling inside when it is built. Received: an optimizer that "
                "was built before tfscale.prepare(model). Write DistributedOptimizer("
                "LossScaleOptimizer(...))."
            )
        self.__wrapped__ = update.undo(self.__wrapped__, self._built_for())
        self._self_update = None

    def _why_uncut(self, model: keras.Model) -> str:
        """Return why parameters that are not sharded yet cannot be, or an empty string."""
        if self._update().is_sharded:
            return ""
        if type(self._update()) is not WholeUpdate or not trains_all(model):
            return "the model's parameters are not updated by one optimizer alone"
        if self._self_reducer.is_routed:
            return "gradients are looked at while they are exchanged"
        if runtime.backend().name == "horovod":
            return "Horovod moves the bytes"
        return why_whole(update_rule(self.__wrapped__))

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return getattr(self._self_update, "process_set", self._self_reducer.process_set)

    @property
    def groups(self) -> list[list[int]] | None:
        """Ranks within which weights are equal, for local SGD; None for all together."""
        return getattr(self._self_update, "groups", None)

    @property
    def strategy(self) -> Exchange:
        """How gradients travel, with what was chosen meanwhile."""
        return getattr(self._self_update, "strategy", self._self_reducer.strategy)

    @property
    def group_average(self) -> Any:
        """What counts and averages in local SGD (`exchange.averaging.GroupAverage`), or None."""
        return getattr(self._self_update, "average", None)

    @property
    def waits_for_groups(self) -> bool:
        """Whether local SGD will start later."""
        return bool(getattr(self._self_update, "is_waiting", False))

    @property
    def n_skipped_steps(self) -> int:
        """Steps that this rank skipped because of `nonfinite="skip"`."""
        return int(self._self_nonfinite.n_skipped)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether steps with gradients that are not finite are skipped, see `nonfinite`."""
        return bool(self._self_nonfinite.policy == "skip")

    def start_groups(self) -> None:
        """Let local SGD start. Collective; the training step must be traced anew."""
        self.__wrapped__ = self._self_update.start(self.__wrapped__)

    def show_own(self) -> None:
        """Make the model's parameters those that this rank and its group hold. Collective."""
        if self._self_update.shards is not None:
            self._self_update.shards.publish(waits=True)

    def set_own(self, values: Sequence[Any]) -> None:
        """Set what this rank updates, and show it in the model. Collective in its group.

        Args:
            values: One for each of `group_average.targets`.
        """
        for variable, value in zip(self.group_average.targets, values, strict=True):
            variable.assign(value)
        self.show_own()

    def _register_local_layers(self) -> None:
        """Register the variables of local layers that exist by now."""
        for layer in self._self_local_layers:
            for variable in layer.trainable_variables:
                if not self._self_reducer.is_local(variable):
                    self._self_reducer.register_local_var(variable)

    def _require_common_norm(self, variables: Sequence[Any]) -> None:
        """Refuse a norm over all gradients where each rank has some of its own.

        Raises:
            ConfigError: Common gradients would be scaled by another factor on each rank.
        """
        norm = getattr(update_rule(self.__wrapped__), "global_clipnorm", None)
        if norm and self.process_set.size() > 1 and any(map(self.is_local_var, variables)):
            raise ConfigError(
                "A norm over all gradients must be equal on all ranks. Received: "
                f"global_clipnorm={norm} with local layers or variables. Use clipnorm, which "
                "looks at each gradient by itself."
            )

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable to each rank alone.

        Args:
            variable: A trainable variable that may differ between ranks.
        """
        self._self_reducer.register_local_var(variable)

    def is_local_var(self, variable: Any) -> bool:
        """Return whether a variable may differ between ranks, as moving statistics of local layers.

        Known before the optimizer is built, which registers what is trained.
        """
        if self._self_reducer.is_local(variable):
            return True
        return any(variable is v for layer in self._self_local_layers for v in layer.weights)
