"""DistributedOptimizer: any Keras optimizer, with gradients that all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.comm.backends.base import raw_variable
from tfscale.comm.compression import Compression
from tfscale.comm.events import stamp_updates
from tfscale.comm.runtime import Average, ProcessSet, global_process_set
from tfscale.config import ConfigError
from tfscale.exchange.base import GradientOptions
from tfscale.exchange.strategies import resolve
from tfscale.gradients import GradientReducer
from tfscale.model_optimizers import trains_all
from tfscale.optimizer_sharing import Sharing
from tfscale.optimizer_state import CompleteState
from tfscale.parameters.retracing import drop_traces
from tfscale.proxy import OptimizerProxy
from tfscale.update.accumulation import Accumulator, refuse_accumulating, refuse_replicated
from tfscale.update.loss_scale import refuse_outer, update_rule
from tfscale.update.nonfinite import NonFinite, Policy
from tfscale.update.rebuilding import unbuilt
from tfscale.update.rules import refuse_bypassed


class DistributedOptimizer(CompleteState, Sharing, OptimizerProxy):
    """A Keras optimizer that applies gradients reduced over all ranks.

    A transparent proxy: every attribute, the class included, is the wrapped optimizer's, so
    learning rates, schedules, checkpoints and saved models are exactly its own, and a saved model
    loads where tfscale is not installed. Only `apply` differs: it reduces the gradients, then
    calls the wrapped optimizer's, so clipping, decay and averaging see reduced gradients.

    Mixed precision: `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))`. Infinite
    values survive the sum, so all ranks skip the same steps. The other order is refused, or
    repaired by `tfscale.prepare` where compile() made it.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: str = Average,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        exchange: Any = "allreduce",
        nonfinite: Policy = "ignore",
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: Any Keras optimizer.
            name: Ignored; the optimizer keeps its own.
            device_dense: Ignored; TensorFlow places the ops.
            device_sparse: Ignored.
            compression: `Compression.none`, `.fp16` or `.bf16`: what travels.
            sparse_as_dense: Make sparse gradients dense before they travel.
            gradient_predivide_factor: Divides before the sum; size / factor divides after it.
            op: Average or Sum.
            backward_passes_per_step: Batches whose gradients are added up locally before they are
                exchanged and applied. `iterations` advances with every batch. Where one rank
                stops amid a cycle, or its update is skipped, all go back to its beginning.
            average_aggregated_gradients: Divide that sum by the number of batches.
            num_groups: Number of buckets of an allreduce; 0 chooses by size.
            groups: Number of buckets, or lists of variables that travel together.
            process_set: Who takes part; other ranks apply their own gradients.
            scale_local_gradients: Divide gradients of local variables (see `register_local_var`)
                by the number of ranks.
            exchange: "allreduce", or a strategy such as `tfscale.Allreduce(bucket_mb=4)`.
            nonfinite: What to do about gradients that are NaN or infinite on some rank: "ignore",
                "raise" (naming rank, step and parameter) or "skip" the step, on all ranks: weights
                and state stay; in `fit` with a callback of tfscale moving statistics stay finite.

        Raises:
            ConfigError: An argument does not fit.
        """
        _check(optimizer, backward_passes_per_step)
        super().__init__(optimizer)
        options = GradientOptions(
            op=op,
            predivide=gradient_predivide_factor,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            num_groups=groups if isinstance(groups, int) else num_groups,
            groups=None if isinstance(groups, int) else groups,
        )
        self._self_reducer = GradientReducer(
            resolve(exchange), options, process_set, scale_local_gradients
        )
        self._self_nonfinite = NonFinite(nonfinite, exchange)
        self._self_update = self._self_accumulator = None
        self._self_local_layers: list[keras.layers.Layer] = []
        if backward_passes_per_step > 1:
            refuse_replicated(resolve(getattr(self._self_reducer.strategy, "within", exchange)))
            self._self_accumulator = Accumulator(
                backward_passes_per_step, average_aggregated_gradients
            )

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Reduce the gradients over all ranks and update the variables.

        Args:
            grads: This rank's gradients, one per variable.
            trainable_variables: The variables; None after `build`.

        Raises:
            ConfigError: There is nothing to train.
            ExchangeError: XLA compiles the step, a LossScaleOptimizer wraps this optimizer, or
                communication failed.
        """
        variables = self._built_for() if trainable_variables is None else list(trainable_variables)
        if self._self_accumulator is None:
            self._apply_reduced(list(grads), variables)
            return
        self._built_update(variables)
        self._self_accumulator.add(
            grads,
            variables,
            update_rule(self.__wrapped__),
            on_full=lambda sums: self._apply_reduced(sums, variables),
        )

    def _apply_reduced(self, gradients: list[Any], variables: list[Any]) -> None:
        if self._self_reducer.process_set.size() > 1:
            refuse_outer(DistributedOptimizer)
        self._register_local_layers()
        is_scaler = type(self.__wrapped__) is keras.optimizers.LossScaleOptimizer
        self._require_common_norm(variables)
        update = self._built_update(variables)
        nonfinite, group = self._self_nonfinite, self._self_reducer.process_set.group()
        inner = nonfinite.guard(
            self.__wrapped__, gradients, variables, group, update.shards is not None
        )
        skips = is_scaler or nonfinite.policy != "ignore"
        stamp_updates(update.apply(inner, gradients, variables, skips))

    def build(self, variables: Sequence[Any]) -> None:
        """Create the optimizer's state, or this rank's part of it, unless it exists.

        Args:
            variables: What it will train; values must be equal on all ranks.
        """
        self._register_local_layers()
        if self._update().shards is None:
            self.__wrapped__ = self._update().build(self.__wrapped__, variables)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Set the final values of variables at the end of `fit`, as Keras does."""
        self._update().finalize(self.__wrapped__, var_list)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Reduce and apply; see `apply`.

        Args:
            grads_and_vars: Pairs of gradient and variable.

        Returns:
            The number of iterations, as Keras does.
        """
        self.apply(*map(list, zip(*grads_and_vars, strict=True)))
        return self.__wrapped__._iterations

    def wire(self, model: keras.Model) -> bool:
        """Let the exchange change the model's layers; `tfscale.prepare` calls this.

        Returns:
            Whether functions of the model must be traced anew.
        """
        self._register_local_layers()
        update = self._update()  # first: groups exchange otherwise than what forms them
        has_changed = self._self_reducer.wire(model)
        if update.is_sharded and trains_all(model):
            if self._self_accumulator is None and hasattr(update, "route"):
                is_rerouted = update.route(model, self.__wrapped__)
                has_changed = is_rerouted or has_changed
                if is_rerouted and update.shards is not None:
                    self._rebuild(model)
            if update.shards is None:
                self.build(model.trainable_variables)
            update.attach(model)
        delay = getattr(update, "delay", None)
        looks = self._self_nonfinite.policy != "ignore"
        why_not = "all gradients are looked at before any update (nonfinite)" if looks else ""
        return (delay is not None and delay(model, self.__wrapped__, why_not)) or has_changed

    def _rebuild(self, model: keras.Model) -> None:
        """Cut parameters and state anew. Collective."""
        state, variables = self.full_state(), self._built_for()  # some may be frozen by now
        inner = unbuilt(self.__wrapped__)
        self.__wrapped__ = self._update().build(inner, variables)
        self.load_own_variables({str(i): value for i, value in enumerate(state)})
        drop_traces([raw_variable(v) for v in variables])

    def after_step(self) -> bool:
        """Let an exchange that measures look at a step. Collective.

        `fit` calls this after each; in a loop of your own do so for `exchange="auto"`.

        Returns:
            Whether the step must be traced anew.
        """
        strategy = self._self_reducer.next_strategy(self._built_for, self._why_uncut)
        return strategy is not None and self._change_strategy(strategy)

    def _around(self, inner: Any) -> DistributedOptimizer:
        other = DistributedOptimizer(inner)
        other._self_reducer = self._self_reducer.copy()
        other._self_nonfinite = NonFinite(self._self_nonfinite.policy)
        other._self_local_layers = list(self._self_local_layers)
        if self._self_accumulator is not None:
            other._self_accumulator = self._self_accumulator.copy_empty()
        return other


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer is a DistributedOptimizer (or wraps one for loss scaling)."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return type(optimizer) is DistributedOptimizer or type(inner) is DistributedOptimizer


def _check(optimizer: Any, passes: int) -> None:
    if is_distributed(optimizer):
        raise ConfigError(
            "An optimizer must be wrapped once. Received: a DistributedOptimizer. "
            "Pass the Keras optimizer itself."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"optimizer must be a Keras optimizer. Received: {type(optimizer).__name__}. "
            "Build one, for example keras.optimizers.SGD(0.1)."
        )
    refuse_bypassed(optimizer)
    if int(passes) != passes or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be 1 or more. Received: {passes}.")
    if passes > 1:
        refuse_accumulating(update_rule(optimizer))
