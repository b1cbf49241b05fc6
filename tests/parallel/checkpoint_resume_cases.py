"""What the ranks of `test_checkpoint_resume` do; a folder is in the environment."""

import os
from pathlib import Path

import numpy as np

import tfscale
from tests.parallel.cases_equality import float64
from tests.parallel.checkpoint_runs import Act, Run, forget_after, growing
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
LOCAL = Run(exchange=tfscale.LocalSGD(2, 4, tfscale.Sharded()))
LOCAL_STEP = 7


def folder() -> Path:
    return Path(os.environ["RESUME_FOLDER"])


def write_results(name, values, logs):
    """Only the last epoch's logs are those of every run."""
    if runtime.rank() == 0:
        numbers = [logs[-1][key] for key in ("loss", "mae")]
        np.savez(folder() / f"{name}.npz", *values, np.array(numbers))


def begin():
    """Train to the end; leave checkpoints up to the first interruption."""
    with float64():
        for name, (run, (first, _)) in RUNS.items():
            values, steps = run.train(folder() / name, every_n_steps=1, keep=99)
            forget_after(folder() / name, first)
            write_results(f"{name}-whole", values, steps.logs)
        LOCAL.write(folder() / "local", LOCAL_STEP)


def go_on():
    """Continue with another number of ranks, and leave a checkpoint for a third one."""
    with float64():
        for name, (run, (first, second)) in RUNS.items():
            where = folder() / name
            assert list_checkpoints(where)[0].step == first
            values, steps = run.train(where, every_n_steps=1, keep=99)
            forget_after(where, second)
            write_results(f"{name}-{runtime.size()}", values, steps.logs)
        go_on_with_other_groups()


def finish():
    """Continue once more, also from shards to whole state and back."""
    other = {"sharded": "allreduce", "allreduce": tfscale.Sharded()}
    with float64():
        for name, (run, (_, second)) in RUNS.items():
            assert list_checkpoints(folder() / name)[0].step == second
            run.exchange = other.get(name, run.exchange)
            values, steps = run.train(folder() / name)
            write_results(f"{name}-{runtime.size()}", values, steps.logs)


def go_on_with_other_groups():
    """Two ranks take the place of two groups of two: each begins with the mean of both models."""
    (found, *_) = list_checkpoints(folder() / "local")
    reader = Reader([Part.stored(found.path, manifest) for manifest in found.check()])
    assert reader.groups == [[0, 1], [2, 3]]
    models = [[reader.get(r, f"weight/{i}") for i in range(6)] for r in (0, 2)]
    assert not np.array_equal(models[0][0], models[1][0])  # within an interval
    begun = []

    def look(model):
        begun.extend([v.numpy() for v in model.trainable_variables])
        begun.append(int(model.optimizer.group_average.since.numpy()))

    _, steps = LOCAL.train(folder() / "local", Act(0, look))
    assert begun.pop() == 0 and steps.batches[0] == LOCAL_STEP % 5
    for own, first, second in zip(begun, *models, strict=True):
        np.testing.assert_allclose(own, (first + second) / 2, rtol=0, atol=1e-15)
