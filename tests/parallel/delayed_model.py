"""A model whose dense layers are updated when they are read, beside one that plain Keras trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.parallel.cases_equality import BATCH


def delayed(first: int = 1, n_layers: int = 2, **options: Any) -> tfscale.Chunked:
    """Return the exchange that all cases are about."""
    return tfscale.Chunked(
        first_chunk_layers=first, replicated_dense=n_layers, delay_dense_update=True, **options
    )


def layers_of(optimizer: Any) -> list[Any]:
    """Return the layers whose updates are delayed."""
    return list(optimizer._self_update._delayed._layers.values())


def due(optimizer: Any) -> list[bool]:
    """Return which of them have an update to make."""
    return [bool(layer._is_due.numpy()) for layer in layers_of(optimizer)]


def summed() -> keras.losses.Loss:
    """Return a loss whose gradients are sums over samples."""
    return keras.losses.MeanSquaredError(reduction="sum")


def batch_of(model: keras.Model, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return samples for a model, equal on all ranks."""
    shape = (BATCH, *model.input_shape[1:])
    is_integer = "int" in model.inputs[0].dtype
    x = random.integers(0, 11, size=shape) if is_integer else random.normal(size=shape)
    return x, random.normal(size=(BATCH, *model.output_shape[1:]))


def alone(
    build: Callable[[], keras.Model], make_rule: Callable[[], Any], n_steps: int
) -> list[np.ndarray]:
    """Return optimizer and model variables of what `Pair.step` trains, by plain Keras."""
    keras.utils.set_random_seed(3)
    model, random = build(), np.random.default_rng(5)
    model.compile(make_rule(), summed())
    for _ in range(n_steps):
        model.train_on_batch(*batch_of(model, random))
    return [v.numpy() for v in [*model.optimizer.variables, *model.variables]]


class Pair:
    """One model trained by all ranks on their samples, its twin on all samples in this process."""

    def __init__(
        self,
        build: Callable[[], keras.Model],
        make_rule: Callable[[], keras.optimizers.Optimizer],
        exchange: Any = None,
        before: Callable[[keras.Model], Any] | None = None,
        has_twin: bool = True,
        **options: Any,
    ) -> None:
        """Build both; losses and gradients are sums, so that ranks may have any number of samples.

        Args:
            build: Makes a model.
            make_rule: Makes an optimizer.
            exchange: None is `delayed()`.
            before: Called with the distributed model before it is prepared.
            has_twin: Whether there is a twin.
            **options: For the distributed optimizer.
        """
        wrapped = hvd.DistributedOptimizer(
            make_rule(), exchange=exchange or delayed(), op=hvd.Sum, **options
        )
        keras.utils.set_random_seed(3)
        self.model = build()
        self.twin = build() if has_twin else None
        if self.twin is not None:
            self.twin.set_weights(self.model.get_weights())
            self.twin.compile(make_rule(), summed())
        self.model.compile(wrapped, summed())
        if before is not None:
            before(self.model)
        tfscale.prepare(self.model)
        self._random = np.random.default_rng(5)

    @property
    def optimizer(self) -> Any:
        """The distributed optimizer."""
        return self.model.optimizer

    def step(self, n_steps: int = 1) -> None:
        """Train both; rank r takes r + 1 of n (n + 1) / 2 parts of a batch."""
        n, rank = tfscale.size(), tfscale.rank()
        cuts = [BATCH * r * (r + 1) // (n * (n + 1)) for r in range(n + 1)]
        own = slice(cuts[rank], cuts[rank + 1])
        for _ in range(n_steps):
            x, y = batch_of(self.model, self._random)
            self.model.train_on_batch(x[own], y[own])
            if self.twin is not None:
                self.twin.train_on_batch(x, y)

    def check(self, what: str = "", expected: list[np.ndarray] | None = None) -> None:
        """Compare all variables with the twin's, or with `expected`; nothing is due then."""
        if self.twin is not None:
            theirs = [*self.twin.optimizer.variables, *self.twin.variables]
            expected = [v.numpy() for v in theirs]
        own = [*self.optimizer.variables, *self.model.variables]
        for mine, single in zip(own, expected or [], strict=True):
            message = f"{what} {mine.path}"
            np.testing.assert_allclose(mine.numpy(), single, 0, 1e-10, err_msg=message)
        assert not any(due(self.optimizer)), what
