"""What the ranks of `test_sharded_resume` do; a folder is in the environment."""

import contextlib
import os
from pathlib import Path

import keras
import numpy as np

import tfscale
from tests.parallel.cases_backup import InterruptAfter, Interruption
from tests.parallel.cases_equality import BATCH, float64
from tests.parallel.sharded_model import compiled, require_state, sharded, state_of
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)

STEPS_PER_EPOCH, N_EPOCHS = 4, 3
SAVED = {"epoch": STEPS_PER_EPOCH, "step": STEPS_PER_EPOCH + 2}  # after so many steps


def folder() -> Path:
    return Path(os.environ["RESUME_FOLDER"])


def all_data():
    """Return the global batches of all steps; each has inputs of shape (batch, 6)."""
    n = STEPS_PER_EPOCH * N_EPOCHS
    random = np.random.default_rng(5)
    return random.normal(size=(n, BATCH, 6)), random.normal(size=(n, BATCH, 3))


class Losses(keras.callbacks.Callback):
    """Keeps the loss of each step, over all ranks."""

    def __init__(self, first: int):
        super().__init__()
        self.found, self.step = {}, first

    def on_train_batch_end(self, batch, logs=None):
        # Metrics are running means within an epoch: each step's loss is taken out of them.
        mean = float(np.mean(tfscale.allgather_object(float(logs["loss"]))))
        before = sum(self.found[f"loss {self.step - i - 1}"] for i in range(batch))
        self.found[f"loss {self.step}"] = mean * (batch + 1) - before
        self.step += 1


def train(model, first: int, stop: int, callbacks=()) -> dict[str, float]:
    """Train on the global batches `first` to `stop`, epoch by epoch; return each step's loss."""
    x, y = all_data()
    losses = Losses(first)
    for begin in range(first - first % STEPS_PER_EPOCH, stop, STEPS_PER_EPOCH):
        rows = slice(max(begin, first), min(begin + STEPS_PER_EPOCH, stop))
        batches = tfscale.data.GlobalBatches(
            np.concatenate(x[rows]), np.concatenate(y[rows]), batch_size=BATCH, shuffle=False
        )
        start = BroadcastGlobalVariablesCallback(0)
        model.fit(
            batches, verbose=0, callbacks=[start, losses, MetricAverageCallback(), *callbacks]
        )
    return losses.found


def write(name: str, model, losses: dict[str, float]) -> None:
    """Write losses, weights and complete state. Collective."""
    values = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
    if tfscale.rank() == 0:
        variables = {f"variable {i}": value for i, value in enumerate(values)}
        np.savez(folder() / f"{name}.npz", **losses, **variables)


class CopyAfter(keras.callbacks.Callback):
    """Keeps the checkpoints of two moments: those that the issue asks for."""

    def __init__(self):
        super().__init__()
        self.n_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.n_steps += 1
        latest = folder() / "latest.keras"
        if self.n_steps == SAVED["step"]:
            latest.replace(folder() / "step.keras")

    def on_epoch_end(self, epoch, logs=None):
        if self.n_steps == SAVED["epoch"]:
            (folder() / "end.keras").replace(folder() / "epoch.keras")


def save():
    """Train to the end; rank 0 alone saves after each epoch and every second step."""
    with float64():
        callbacks = []
        if tfscale.rank() == 0:
            x, y = all_data()
            np.savez(folder() / "data.npz", x=x, y=y)
            callbacks = [
                keras.callbacks.ModelCheckpoint(str(folder() / "end.keras")),
                keras.callbacks.ModelCheckpoint(str(folder() / "latest.keras"), save_freq=2),
                CopyAfter(),
            ]
        model = compiled(sharded(keras.optimizers.Adam(0.01)))
        losses = train(model, 0, STEPS_PER_EPOCH * N_EPOCHS, callbacks)
        write("uninterrupted", model, losses)


def go_on():
    """Load on all ranks and train on the remaining batches."""
    with float64():
        for moment, first in SAVED.items():
            model = tfscale.load_model(folder() / f"{moment}.keras", exchange=tfscale.Sharded())
            losses = train(model, first, STEPS_PER_EPOCH * N_EPOCHS)
            assert model.optimizer.parts
            write(f"{tfscale.size()}-{moment}", model, losses)


def fit_with_backup(save_freq, *callbacks):
    """Train for three epochs on the same batches; only rank 0 has the folder."""
    x, y = (values[:STEPS_PER_EPOCH] for values in all_data())
    batches = tfscale.data.GlobalBatches(
        np.concatenate(x), np.concatenate(y), batch_size=BATCH, shuffle=False
    )
    name = f"backup-{save_freq}" if tfscale.rank() == 0 else f"not-there-{tfscale.rank()}"
    model = compiled(sharded(keras.optimizers.Adam(0.01)), seed=3 + tfscale.rank())
    backup = BackupAndRestore(str(folder() / name), save_freq=save_freq)
    start = BroadcastGlobalVariablesCallback(0)
    with contextlib.suppress(Interruption):
        model.fit(batches, epochs=N_EPOCHS, verbose=0, callbacks=[backup, start, *callbacks])
    return model


def back_up():
    """Stop at the end of the second epoch, before its own backup is written."""
    with float64():
        for save_freq in ("epoch", 3):
            fit_with_backup(save_freq, InterruptAfter(1))


def restore():
    """Resume where the backup was taken: after four steps, or after six, in mid-epoch."""
    with float64():
        x, y = all_data()
        for save_freq in ("epoch", 3):
            model = fit_with_backup(save_freq)
            single = compiled(keras.optimizers.Adam(0.01))
            for step in range(N_EPOCHS * STEPS_PER_EPOCH):
                place = step % STEPS_PER_EPOCH
                single.train_on_batch(x[place], y[place])
            require_state(model, state_of(single), save_freq)
