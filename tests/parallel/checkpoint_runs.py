"""Runs that continue from their checkpoints, as restarts of one program do."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfscale
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    MetricAverageCallback,
)
from tfscale.checkpoints import list_checkpoints

BATCH, STEPS, EPOCHS = 24, 5, 3


class Steps(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs or {}))


class Act(keras.callbacks.Callback):
    """Does something with the model before a step of that number of this `fit`, on some ranks."""

    def __init__(self, step: int, action: Callable[[keras.Model], Any], rank: int = -1) -> None:
        super().__init__()
        self.left, self.action, self.rank = step, action, rank

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0 and self.rank in (-1, tfscale.rank()):
            self.action(self.model)
        self.left -= 1


def model_of(rate: float) -> keras.Model:
    """Dropout and moving statistics, where ranks differ, if the rate is not 0."""
    layers = keras.layers
    extra = [layers.BatchNormalization(), layers.Dropout(rate)] if rate else []
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), *extra, layers.Dense(7), layers.Dense(3)]
    )


@dataclass
class Run:
    """Settings of a run; `train` may be called again and again, as restarts of one program."""

    optimizer: Callable[[], Any] = field(default=lambda: keras.optimizers.Adam(0.01))
    exchange: Any = "allreduce"
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Any], Sequence[Any]] = field(default=lambda data: ())
    seed: int = 3

    def train(
        self, folder: Path | None = None, *watching: Any, **options: Any
    ) -> tuple[list[np.ndarray], Steps]:
        """Train; return weights, what layers keep and the complete state, and what was noted."""
        keras.utils.set_random_seed(self.seed + tfscale.rank())
        model = model_of(self.dropout)
        exchange = self.exchange() if callable(self.exchange) else self.exchange
        optimizer = tfscale.DistributedOptimizer(
            self.optimizer(), exchange=exchange, **self.options
        )
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        random = np.random.default_rng(1)
        x, y = random.normal(size=(STEPS * BATCH, 6)), random.normal(size=(STEPS * BATCH, 3))
        data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, seed=4)
        steps = Steps()
        callbacks: list[Any] = [Checkpoint(folder, **options)] if folder else []
        callbacks += [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
        callbacks += [*self.callbacks(data), steps, *watching]
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        values = [v.numpy() for v in model.variables if "seed" not in v.path]
        return [*values, *optimizer.full_state()], steps

    def write(self, folder: Path, step: int) -> tuple[list[np.ndarray], Steps]:
        """Train to the end, and leave the checkpoints up to that of a step. Collective."""
        results = self.train(folder, every_n_steps=1, keep=99)
        forget_after(folder, step)
        return results


def forget_after(folder: Path, step: int) -> None:
    tfscale.barrier()
    if tfscale.rank() == 0:
        for found in list_checkpoints(folder):
            if found.step > step:
                shutil.rmtree(found.path)
        newest = list_checkpoints(folder)[0]
        assert newest.is_finished and newest.step == step
    tfscale.barrier()


def growing(data: Any) -> list[Any]:
    """Double the batch after each epoch: 5 steps, 2 steps, 1 step."""
    return [
        AdaptiveBatchSize(
            data, 4 * BATCH, interval=1, log_path=None, saturation=None, momentum_correction=False
        )
    ]
