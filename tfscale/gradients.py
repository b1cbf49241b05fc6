"""From the gradients of this rank to those that every rank applies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm.eager import note_gradients
from tfscale.comm.runtime import ProcessSet
from tfscale.comm.sparse import deduplicate
from tfscale.config import ConfigError, PlanError
from tfscale.exchange import dense
from tfscale.exchange.auto import Auto
from tfscale.exchange.base import Exchange, GradientOptions
from tfscale.exchange.bucketed import name_of
from tfscale.measure.auto import Watch, WhyUncut, watch
from tfscale.plan.chunks import owner_of


class GradientReducer:
    """What a distributed optimizer and a distributed tape share.

    Attributes:
        process_set: Who takes part.
        options: How gradients are reduced.
    """

    def __init__(
        self,
        strategy: Exchange,
        options: GradientOptions,
        process_set: ProcessSet,
        scale_local_gradients: bool = True,
    ) -> None:
        """Keep what does not change during training.

        Args:
            strategy: How bytes travel.
            options: How gradients are reduced.
            process_set: Who takes part; other ranks keep their own gradients.
            scale_local_gradients: Divide gradients of local variables by the number of ranks.

        Raises:
            ConfigError: An option does not fit.
        """
        if not isinstance(process_set, ProcessSet):
            raise ConfigError(
                f"process_set must be a ProcessSet. Received: {process_set!r}. "
                "Make one with tfscale.add_process_set(ranks)."
            )
        self.process_set = process_set
        self.options = options
        self.strategy = strategy
        self._given = (strategy, process_set)
        self._scale_local_gradients = scale_local_gradients
        self._local: list[Any] = []
        self._exchange: Callable[..., list[Any]] | None = None
        self._wired: weakref.ref[keras.Model] | None = None
        self._watch: Watch | None = None
        self._is_watched = False

    def wire(self, model: keras.Model) -> bool:
        """Let the strategy change the layers of a model; done once per model.

        Args:
            model: A compiled model.

        Returns:
            Whether layers compute otherwise than before, so that functions must be traced anew.

        Raises:
            PlanError: The strategy does not fit the model.
        """
        if self._wired is not None and self._wired() is model:
            return False
        self._wired = weakref.ref(model)
        has_changed = any([dense.restore(layer) for layer in model._flatten_layers()])
        wire = getattr(self.strategy, "wire", None)
        chosen = wire(model, self.options, self.process_set) if wire else []
        for layer in model._flatten_layers():
            if any(self.is_local(v) for v in dense.own_weights(layer)):
                dense.restore(layer)  # its gradients stay on this rank
        return has_changed or bool(chosen)

    def next_strategy(
        self, variables: Callable[[], Sequence[Any]], why_uncut: WhyUncut
    ) -> Exchange | None:
        """Let a strategy that measures look at a step. Collective.

        Args:
            variables: Returns the trainable variables.
            why_uncut: Returns why parameters cannot be sharded, or an empty string.

        Returns:
            What `change_strategy` must be given before the next step; mostly None.
        """
        if not self._is_watched:
            shared = [name_of(v) for v in variables() if not self.is_local(v)]
            layers = list(dict.fromkeys(owner_of(name) for name in shared))
            model = self._wired() if self._wired is not None else None
            self._watch = watch(self.strategy, layers, model, why_uncut)
            self._is_watched = True
        return None if self._watch is None else self._watch.step()

    def change_strategy(self, strategy: Exchange) -> keras.Model | None:
        """Take another strategy; the step must be traced anew.

        Args:
            strategy: Equal on all ranks.

        Returns:
            The model that must be wired again, if there is one.
        """
        self.strategy = strategy
        model = self._wired() if self._wired is not None else None
        self._wired = None
        return model

    @property
    def may_cut(self) -> bool:
        """Whether the strategy may change to one that shards parameters."""
        return self._watch.may_cut if self._watch else isinstance(self.strategy, Auto)

    @property
    def is_routed(self) -> bool:
        """Whether gradients go another way than the strategy's own."""
        return self._exchange is not None

    def route(self, exchange: Callable[..., list[Any]] | None) -> None:
        """Let gradients go another way than the strategy's own.

        Args:
            exchange: Called like the strategy's `exchange`; None is the strategy's own again.
        """
        self._exchange = exchange

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._local.append(variable)

    def copy(self) -> GradientReducer:
        """Return a reducer with the same options and local variables."""
        strategy, process_set = self._given  # whatever a choice or a group has made of them
        other = GradientReducer(strategy, self.options, process_set, self._scale_local_gradients)
        other._local = list(self._local)
        return other

    def is_local(self, variable: Any) -> bool:
        """Return whether a variable was registered as local."""
        return any(variable is v for v in self._local)

    # Nothing here is for AutoGraph, which would read and convert it in every traced function.
    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], skips_non_finite: bool = False
    ) -> list[Any]:
        """Return gradients that are equal on all ranks of the process set.

        Args:
            gradients: Tensors, IndexedSlices or None, one per variable.
            variables: The variables they belong to.
            skips_non_finite: The optimizer skips a step with an infinite gradient. One of a local
                variable then makes a common gradient NaN, so that all ranks skip it.

        Returns:
            One gradient per variable; None stays None; gradients of local variables are this
            rank's own, divided by the number of ranks if asked for.

        Raises:
            ConfigError: There is no variable to train.
            ExchangeError: The graph is compiled with XLA.
            PlanError: The strategy needs a prepared model, and this one is not.
        """
        group = self.process_set.group()
        if group.size == 1 or group.rank < 0:
            # Keras's own rules go wrong where an index is repeated (Adam adds up squares of
            # parts); one process must train as several do.
            return [deduplicate(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if not variables:
            raise ConfigError(
                "There must be variables to train. Received: none. Build the model before "
                "training: call it on a batch, or call tfscale.prepare(model, sample_batch)."
            )
        results = list(gradients)
        shared = []
        pairs = list(zip(gradients, variables, strict=True))
        for i, (gradient, variable) in enumerate(pairs):
            if gradient is None:
                continue
            if not self.is_local(variable):
                shared.append(i)
            elif self._scale_local_gradients:
                results[i] = _divide(gradient, group.size)
        if not shared:
            return results
        self._require_prepared()
        note_gradients()
        own = [gradients[i] for i in shared]
        if skips_non_finite:
            local = [g for g, v in pairs if g is not None and self.is_local(v)]
            _spoil(own, [variables[i] for i in shared], local)
        exchange = self._exchange or self.strategy.exchange
        reduced = exchange(own, [variables[i] for i in shared], group, self.options)
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return results

    def _require_prepared(self) -> None:
        if getattr(self.strategy, "replicated_dense", 0) and self._wired is None:
            raise PlanError(
                "Dense layers must be prepared before they exchange activations. Received: a step "
                "of a model that was not. Call tfscale.prepare(model) after compile(), or give fit "
                "a tfscale callback; a tape cannot: use DistributedOptimizer."
            )


def first_exchanged(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return the gradient that is ready first: that of the last variable."""
    if tf.executing_eagerly():
        return []
    ready = [g for g in gradients if g is not None][-1:]
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in ready]


def _spoil(own: list[Any], variables: Sequence[Any], local: list[Any]) -> None:
    """Add zero to a gradient that travels, or NaN where a local gradient is not finite."""
    if not local:
        return
    # The gradient of a replicated layer does not travel: nobody else would see it.
    sent = [k for k, variable in enumerate(variables) if not dense.is_whole(variable)]
    if not sent:
        raise PlanError(
            "To skip steps some gradient must travel. Received: local layers, and all others "
            "replicated. Use exchange='allreduce'."
        )
    last = tf.convert_to_tensor(own[sent[-1]])
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in local]
    # Each product is cast after it: a large float32 must not become infinite as float16.
    zeros = [tf.cast(tf.reduce_sum(0 * v), last.dtype) for v in values]
    own[sent[-1]] = last + tf.add_n(zeros)


def _divide(gradient: Any, size: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
    return gradient / size
