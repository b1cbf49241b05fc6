"""Cases that `test_resume` runs on ranks; the environment names their folder."""

import contextlib
import os
from pathlib import Path

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import InterruptAt, Interruption, float64, values_of
from tests.parallel import cases_adaptive
from tests.parallel.cases_equality import BATCH
from tests.parallel.checkpoint_runs import Run, forget_after, growing
from tests.parallel.sharded_model import compiled, require_state, sharded, state_of
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)
from tfscale.checkpoints import list_checkpoints
from tfscale.checkpoints.files import Part
from tfscale.checkpoints.snapshot_restore import Reader
from tfscale.comm import runtime

# Each run: steps after which it continues with other ranks. A first one has 15 steps, a growing 8.
RUNS = {
    "allreduce": (Run(), (8, 12)),
    "sharded": (Run(exchange=tfscale.Sharded()), (8, 12)),
    "growing": (Run(exchange=tfscale.Sharded(), callbacks=growing), (6, 7)),
    "passes": (Run(options={"backward_passes_per_step": 2}), (7, 13)),
}
# Of local SGD: two groups of two ranks, and steps after which two ranks continue.
LOCAL = {
    "sharded": (tfscale.LocalSGD(2, 4), 7),
    "growing": (tfscale.LocalSGD(2, tfscale.GrowingInterval(2, 0.5, 6)), 7),
    "overlapped": (tfscale.LocalSGD(2, 4, fragments=2, overlap=3), 7),
    "measured": (tfscale.LocalSGD(2, 3, "allreduce", fragments=3, overlap="auto"), 12),
}
# Steps since the last average, interval and overlap, before the first step and after each.
NOTED = {
    "sharded": [(i % 4, 4, None) for i in range(9)],
    # The third interval had 4 steps and is made again; the fourth has 5.
    "growing": [*((i, 4, None) for i in range(4)), *((i, 5, None) for i in range(5))],
    "overlapped": [(i % 4, 4, 3) for i in range(9)],
    "measured": [(i % 3, 3, 2) for i in range(4)],  # again: with the most, until it is known
}


def folder() -> Path:
    return Path(os.environ["RESUME_FOLDER"])


def write_results(name, values, logs):
    """Only the last epoch's logs are those of every run."""
    if runtime.rank() == 0:
        numbers = [logs[-1][key] for key in ("loss", "mae")]
        np.savez(folder() / f"{name}.npz", *values, np.array(numbers))


def begin():
    with float64():
        for name, (run, (first, _)) in RUNS.items():
            values, steps = run.train(folder() / name, every_n_steps=1, keep=99)
            forget_after(folder() / name, first)
            write_results(f"{name}-whole", values, steps.logs)
    begin_groups("sharded")


def go_on():
    """Continue with another number of ranks, and leave a checkpoint for a third one."""
    with float64():
        for name, (run, (first, second)) in RUNS.items():
            where = folder() / name
            assert list_checkpoints(where)[0].step == first
            values, steps = run.train(where, every_n_steps=1, keep=99)
            forget_after(where, second)
            write_results(f"{name}-{runtime.size()}", values, steps.logs)
    go_on_with_groups("sharded")


def finish():
    other = {"sharded": "allreduce", "allreduce": tfscale.Sharded()}
    with float64():
        for name, (run, (_, second)) in RUNS.items():
            assert list_checkpoints(folder() / name)[0].step == second
            run.exchange = other.get(name, run.exchange)
            values, steps = run.train(folder() / name)
            write_results(f"{name}-{runtime.size()}", values, steps.logs)


def begin_groups(*names):
    with float64():
        for name in names or LOCAL:
            strategy, step = LOCAL[name]
            Run(exchange=strategy).write(folder() / f"local-{name}", step)


class Averages(keras.callbacks.Callback):
    """Notes parameters before the first step, and interval and overlap after each."""

    def __init__(self):
        super().__init__()
        self.begun, self.noted = [], []

    def _note(self):
        average = self.model.optimizer.group_average
        overlap = average.record().get("overlap")
        self.noted.append((int(average.since), int(average.interval), overlap))

    def on_train_batch_begin(self, batch, logs=None):
        if not self.noted:
            self.begun = values_of(self.model.trainable_variables)
            self._note()

    def on_train_batch_end(self, batch, logs=None):
        self._note()


def go_on_with_groups(*names):
    with float64():
        for name in names or LOCAL:
            go_on_with_other_groups(name, *LOCAL[name])


def go_on_with_other_groups(name, strategy, step):
    """Two ranks take the place of two groups of two: each begins with the mean of both models."""
    where, seen = folder() / f"local-{name}", Averages()
    (found, *_) = list_checkpoints(where)
    reader = Reader([Part.stored(found.path, manifest) for manifest in found.check()])
    assert reader.groups == [[0, 1], [2, 3]]
    models = [[reader.get(r, f"weight/{i}") for i in range(6)] for r in (0, 2)]
    assert not np.array_equal(models[0][0], models[1][0])  # within an interval
    _, steps = Run(exchange=strategy).train(where, seen)
    assert steps.batches[0] == step % 5
    for own, first, second in zip(seen.begun, *models, strict=True):
        np.testing.assert_allclose(own, (first + second) / 2, rtol=0, atol=1e-15)
    assert seen.noted == NOTED[name], (name, seen.noted)


STEPS_PER_EPOCH, N_EPOCHS = 4, 3
SAVED = {"epoch": STEPS_PER_EPOCH, "step": STEPS_PER_EPOCH + 2}  # after so many steps


def all_data():
    """Return the global batches of all steps; each has inputs of shape (batch, 6)."""
    n = STEPS_PER_EPOCH * N_EPOCHS
    random = np.random.default_rng(5)
    return random.normal(size=(n, BATCH, 6)), random.normal(size=(n, BATCH, 3))


class Losses(keras.callbacks.Callback):
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


def write_sharded(name: str, model, losses: dict[str, float]) -> None:
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


def save_sharded():
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
        write_sharded("uninterrupted", model, losses)


def go_on_sharded():
    """Load on all ranks and train on the remaining batches."""
    with float64():
        for moment, first in SAVED.items():
            model = tfscale.load_model(folder() / f"{moment}.keras", exchange=tfscale.Sharded())
            losses = train(model, first, STEPS_PER_EPOCH * N_EPOCHS)
            assert model.optimizer.parts
            write_sharded(f"{tfscale.size()}-{moment}", model, losses)


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
            fit_with_backup(save_freq, InterruptAt(1))


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


def grow():
    """Train with growing batches, interrupted in an epoch if one is in the environment."""
    name, _, at = os.environ["RESUME_RUN"].partition(" ")
    backup = [BackupAndRestore(str(folder() / "backup"))] if name != "whole" else []
    interruption = [InterruptAt(int(at), 0)] if at else []
    with float64():
        model, _ = cases_adaptive.fit(
            cases_adaptive.adam,
            folder() / f"{name.split('-')[0]}.jsonl",
            extra=[*backup, *interruption],
            interval=None,
            decay_epochs=(7,),
        )
        if runtime.rank() == 0:
            np.savez(folder() / f"{name}.npz", *model.get_weights())
