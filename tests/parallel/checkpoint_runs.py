"""Runs that are interrupted by an error at some step, and go on from their checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfscale
from tfscale import runtime
from tfscale.callbacks import (
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    MetricAverageCallback,
)

BATCH, STEPS, EPOCHS = 24, 5, 3


class Interruption(Exception):
    """Ends fit on all ranks at the same place."""


class InterruptBefore(keras.callbacks.Callback):
    """Raises before the step of that number, counted over all epochs."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise Interruption
        self.left -= 1


class Steps(keras.callbacks.Callback):
    """Keeps the numbers of steps, and what the logs of each epoch say."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs or {}))


def layers_of(rate: float) -> keras.Model:
    """Dropout and moving statistics, where ranks differ, if the rate is not 0."""
    layers = keras.layers
    extra = [layers.BatchNormalization(), layers.Dropout(rate)] if rate else []
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), *extra, layers.Dense(7), layers.Dense(3)]
    )


@dataclass
class Run:
    """How a run is made; `train` may be called again and again, as restarts of one program.

    Attributes:
        optimizer: Makes the Keras optimizer.
        exchange: How gradients travel.
        dropout: Rate; above 0 the model has state that differs between ranks.
        options: For DistributedOptimizer.
        callbacks: Makes further callbacks, given the data.
        batch_size: Samples of a step over all ranks.
    """

    optimizer: Callable[[], Any] = field(default=lambda: keras.optimizers.Adam(0.01))
    exchange: Any = "allreduce"
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Any], Sequence[Any]] = field(default=lambda data: ())
    batch_size: int = BATCH
    seed: int = 3

    def train(
        self, folder: Path | None = None, stop: int | None = None, **options: Any
    ) -> tuple[list[np.ndarray], Steps]:
        """Train; return weights, what layers keep and the complete state, and what was noted.

        Args:
            folder: For checkpoints; None writes none.
            stop: Steps after which an error ends the run.
            **options: For Checkpoint.
        """
        keras.utils.set_random_seed(self.seed + runtime.rank())
        model = layers_of(self.dropout)
        optimizer = tfscale.DistributedOptimizer(
            self.optimizer(), exchange=self.exchange, **self.options
        )
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        random = np.random.default_rng(1)
        x, y = random.normal(size=(STEPS * BATCH, 6)), random.normal(size=(STEPS * BATCH, 3))
        data = tfscale.data.GlobalBatches(x, y, batch_size=self.batch_size, seed=4)
        steps = Steps()
        callbacks: list[Any] = [Checkpoint(folder, **options)] if folder else []
        callbacks += [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
        callbacks += [*self.callbacks(data), steps]
        callbacks += [InterruptBefore(stop)] if stop is not None else []
        with contextlib.suppress(Interruption):
            model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        for callback in callbacks[:1]:
            if folder:
                callback._writer.wait()  # as the end of the process would
                callback._handler.remove()
        values = [v.numpy() for v in model.variables if "seed" not in v.path]
        return [*values, *optimizer.full_state()], steps
