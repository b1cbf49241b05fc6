"""Runs that other numbers of ranks resume end as if undisturbed: float64, 1e-10."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.spawn import spawn


def run(size: int, case: str, folder, **env: str) -> None:
    name = f"tests.parallel.resume_cases:{case}"
    results = spawn(size, [name], 500.0, {"RESUME_FOLDER": str(folder), **env})
    bad = [f"rank {r.rank}: {r.status}\n{r.text}" for r in results if r.status != "ok"]
    assert not bad, "\n".join(bad)


def require_equal(folder, name: str, whole: str, *, is_complete: bool = True) -> None:
    """Compare the arrays of a run with those of one that was not interrupted."""
    with np.load(folder / f"{name}.npz") as found, np.load(folder / f"{whole}.npz") as expected:
        assert found.files and (found.files == expected.files or not is_complete)
        for key in found.files:
            np.testing.assert_allclose(
                found[key], expected[key], rtol=0, atol=1e-10, err_msg=f"{name}: {key}"
            )


@pytest.mark.quick
@pytest.mark.timeout(0)
def test_checkpoints(tmp_path):
    """Weights, complete state, loss and metrics of the last epoch."""
    for size, case in ((4, "begin"), (2, "go_on"), (3, "finish")):
        run(size, case, tmp_path)
    for name in ("allreduce", "sharded", "growing", "passes"):
        for size in (2, 3):
            require_equal(tmp_path, f"{name}-{size}", f"{name}-whole")


@pytest.mark.timeout(0)
def test_groups_of_local_sgd(tmp_path):
    """Intervals that grow, averages on their way and a measured overlap, with other groups."""
    run(4, "begin_groups", tmp_path)
    run(2, "go_on_with_groups", tmp_path)


@pytest.mark.timeout(400)
def test_growing_batches(tmp_path):
    for size, name in ((1, "whole"), (3, "cut-1 3"), (2, "cut-2 6"), (1, "cut-3")):
        run(size, "grow", tmp_path, RESUME_RUN=name)
    require_equal(tmp_path, "cut-3", "whole")
    whole, cut = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    )
    for key in ("epoch", "batch_size", "interval", "next_rate_scale", "next_batch_size"):
        assert [line[key] for line in cut] == [line[key] for line in whole]
    thetas = [[line["theta"] for line in lines] for lines in (cut, whole)]
    np.testing.assert_allclose(*thetas, rtol=1e-9)
    assert [line["active_ranks"] for line in cut] == [3, 3, 3, 2, 2, 2, 1, 1, 1]
    assert len({line["batch_size"] for line in cut}) > 1


@pytest.mark.timeout(0)
def test_models_saved_by_sharded_ranks(tmp_path):
    """Losses of the remaining steps, weights and complete state; also in plain Keras."""
    run(4, "save_sharded", tmp_path)
    for moment in ("epoch", "step"):
        assert (tmp_path / f"{moment}.keras").exists()
    for size in (2, 3):
        run(size, "go_on_sharded", tmp_path)
        for moment in ("epoch", "step"):
            require_equal(tmp_path, f"{size}-{moment}", "uninterrupted", is_complete=False)
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for moment in json.loads(done.stdout.splitlines()[-1]):
        require_equal(tmp_path, f"plain-{moment}", "uninterrupted", is_complete=False)


@pytest.mark.timeout(0)
def test_backups_of_sharded_ranks(tmp_path):
    """Written between epochs and between steps; read by rank 0 alone."""
    run(3, "back_up", tmp_path)
    run(2, "restore", tmp_path)


PLAIN = """
import json, sys
sys.modules["tfscale"] = None  # every import of it raises
from pathlib import Path
import keras, numpy as np

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
folder = Path(sys.argv[1])
data = np.load(folder / "data.npz")
moments = {"epoch": 4, "step": 6}
for moment, first in moments.items():
    model = keras.models.load_model(folder / f"{moment}.keras")
    found = {}
    for step in range(first, len(data["x"])):
        found[f"loss {step}"] = model.train_on_batch(data["x"][step], data["y"][step])
        model.reset_metrics()
    for i, v in enumerate([*model.variables, *model.optimizer.variables]):
        found[f"variable {i}"] = v.numpy()
    np.savez(folder / f"plain-{moment}.npz", **found)
print(json.dumps(list(moments)))
"""
