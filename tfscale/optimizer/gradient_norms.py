"""Norms of each rank's gradient and of the mean gradient, computed during the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.collectives import deduplicate
from tfscale.config import ConfigError
from tfscale.exchange.dense import use_of
from tfscale.internals.keras import drop_functions
from tfscale.optimizer.distributed import distributed_of


class GradientNorms:
    """Sums over steps of squared gradient norms, computed without messages of their own.

    Dense layers whose gradient is that of the whole batch on every rank (`replicated_dense`) are
    left out, and so are steps with gradients that are not finite.
    """

    def __init__(self) -> None:
        # Squared norm of this rank's gradient, of the mean over ranks; number of steps.
        self._sums = tf.Variable(tf.zeros(3, tf.float64), trainable=False)

    def watch(self, model: keras.Model) -> None:
        """Observe the gradients of a model from the next trace on.

        Raises:
            ConfigError: The model has no gradients of several ranks that can be compared.
        """
        optimizer: Any = model.optimizer
        if runtime.size() < 2:
            raise ConfigError(
                "signal='noise_scale' needs two ranks or more. Received: one process. Start two "
                "ranks or more, or use signal='theta'."
            )
        distributed = distributed_of(optimizer)
        if distributed is None:
            raise ConfigError(
                "signal='noise_scale' needs a tfscale.DistributedOptimizer. Received: "
                f"{type(optimizer).__name__}. Wrap the optimizer, or use signal='theta'."
            )
        strategy, executor = distributed.strategy, distributed.bound.executor
        accumulates = distributed.accumulator is not None
        is_all = executor.process_set.size() == runtime.size()
        is_cut = strategy.is_sharding or strategy.trains_apart
        if is_cut or accumulates or not is_all:
            raise ConfigError(
                "signal='noise_scale' needs the sum of all ranks' whole gradients in every "
                f"step. Received: exchange={strategy}, backward_passes_per_step "
                f"{'above' if accumulates else '='} 1, {executor.process_set.size()} of "
                f"{runtime.size()} ranks. Use exchange='allreduce' or 'chunked' on all ranks, or "
                "signal='theta'."
            )
        self._scale = 1 if executor.options.op == runtime.Average else executor.process_set.size()
        executor.observers.add(self)
        drop_functions(model, "train_function")  # a function traced before would not observe them

    def reset(self) -> None:
        """Set the sums to zero."""
        self._sums.assign(tf.zeros(3, tf.float64))

    def values(self) -> list[float]:
        """Return the sums: squared norms of own and of mean gradients, number of steps."""
        return [float(value) for value in self._sums.numpy()]

    def restore(self, values: Sequence[float]) -> None:
        """Resume from a result of `values`."""
        self._sums.assign(values)

    def observe(
        self, local_gradients: Sequence[Any], reduced: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Add the norms of a step."""
        chosen = [i for i, variable in enumerate(variables) if use_of(variable) == "weights"]
        local = _square([local_gradients[i] for i in chosen])
        mean = _square([reduced[i] for i in chosen]) / self._scale**2
        values = tf.stack([local, mean, tf.ones((), tf.float64)])
        self._sums.assign_add(
            tf.where(tf.reduce_all(tf.math.is_finite(values)), values, tf.zeros_like(values))
        )


def _square(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the squared L2 norm of all gradients together."""
    squares = [tf.zeros((), tf.float64)]
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            gradient = deduplicate(gradient).values
        square = tf.reduce_sum(tf.square(tf.cast(gradient, _wide(gradient.dtype))))
        squares.append(tf.cast(square, tf.float64))
    return tf.add_n(squares)


def _wide(dtype: tf.DType) -> tf.DType:
    """Return the dtype for sums of squares: float16 would overflow."""
    return dtype if dtype == tf.float64 else tf.float32
