"""Cases that `test_resume` runs on ranks; the environment names their folder."""

import os
from pathlib import Path

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import InterruptAt, float64, values_of
from tests.parallel import cases_adaptive
from tests.parallel.checkpoint_runs import Run, forget_after, growing
from tfscale.callbacks import BackupAndRestore
from tfscale.checkpoints import list_checkpoints
from tfscale.checkpoints.files import Part
from tfscale.checkpoints.snapshot_restore import Reader

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
    if tfscale.rank() == 0:
        numbers = [logs[-1][key] for key in ("loss", "mae")]
        np.savez(folder() / f"{name}.npz", *values, np.array(numbers))


def begin():
    with float64():
        for name, (run, (first, _)) in RUNS.items():
            values, steps = run.train(folder() / name, every_n_steps=1, keep=99)
            forget_after(folder() / name, first)
            write_results(f"{name}-whole", values, steps.logs)


def go_on():
    """Continue with another number of ranks, and leave a checkpoint for a third one."""
    with float64():
        for name, (run, (first, second)) in RUNS.items():
            where = folder() / name
            assert list_checkpoints(where)[0].step == first
            values, steps = run.train(where, every_n_steps=1, keep=99)
            forget_after(where, second)
            write_results(f"{name}-{tfscale.size()}", values, steps.logs)


def finish():
    other = {"sharded": "allreduce", "allreduce": tfscale.Sharded()}
    with float64():
        for name, (run, (_, second)) in RUNS.items():
            assert list_checkpoints(folder() / name)[0].step == second
            run.exchange = other.get(name, run.exchange)
            values, steps = run.train(folder() / name)
            write_results(f"{name}-{tfscale.size()}", values, steps.logs)


def begin_groups():
    with float64():
        for name, (strategy, step) in LOCAL.items():
            Run(exchange=strategy).write(folder() / f"local-{name}", step)


class Averages(keras.callbacks.Callback):
    """Notes parameters before the first step, and interval and overlap after each."""

    def __init__(self):
        super().__init__()
        self.begun, self.noted = [], []

    def _note(self):
        average = self.model.optimizer.bound.average
        overlap = average.record().get("overlap")
        self.noted.append((int(average.since), int(average.interval), overlap))

    def on_train_batch_begin(self, batch, logs=None):
        if not self.noted:
            self.begun = values_of(self.model.trainable_variables)
            self._note()

    def on_train_batch_end(self, batch, logs=None):
        self._note()


def go_on_with_groups():
    """Two ranks take the place of two groups of two: each begins with the mean of both models."""
    with float64():
        for name, (strategy, step) in LOCAL.items():
            where, seen = folder() / f"local-{name}", Averages()
            (found, *_) = list_checkpoints(where)
            reader = Reader([Part.stored(found.path, manifest) for manifest in found.check()])
            assert reader.groups == [[0, 1], [2, 3]]
            parts = [reader.parts[rank].arrays for rank in (0, 2)]
            models = [[arrays[f"weight/{i}"] for i in range(6)] for arrays in parts]
            assert not np.array_equal(models[0][0], models[1][0])  # within an interval
            _, steps = Run(exchange=strategy).train(where, seen)
            assert steps.batches[0] == step % 5
            for own, first, second in zip(seen.begun, *models, strict=True):
                np.testing.assert_allclose(own, (first + second) / 2, rtol=0, atol=1e-15)
            assert seen.noted == NOTED[name], (name, seen.noted)


def grow():
    """Train with growing batches, interrupted in an epoch if one is in the environment.

    Only rank 0 sees the folder of the backup.
    """
    name, _, at = os.environ["RESUME_RUN"].partition(" ")
    where = "backup" if tfscale.rank() == 0 else f"not-there-{tfscale.rank()}"
    backup = [BackupAndRestore(str(folder() / where))] if name != "whole" else []
    interruption = [InterruptAt(int(at), 0)] if at else []
    with float64():
        model, _ = cases_adaptive.fit(
            cases_adaptive.adam,
            folder() / f"{name.split('-')[0]}.jsonl",
            tfscale.Sharded(),
            extra=[*backup, *interruption],
            interval=None,
            decay_epochs=(7,),
        )
        values = [*model.get_weights(), *model.optimizer.full_state()]
        if tfscale.rank() == 0:
            np.savez(folder() / f"{name}.npz", *values)
