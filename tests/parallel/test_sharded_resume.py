"""Saved at 4 ranks, resumed at 2, at 3 and by plain Keras: as if nothing had happened."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.spawn import spawn

TOLERANCE = 1e-10
CASES = "tests.parallel.sharded_resume_cases"


def run(size: int, case: str, folder) -> None:
    results = spawn(size, [f"{CASES}:{case}"], 200.0, {"RESUME_FOLDER": str(folder)})
    bad = [r for r in results if r.status != "ok"]
    assert not bad, "\n".join(f"rank {r.rank}: {r.status}\n{r.text}" for r in bad)


def require_equal(folder, name: str) -> None:
    expected, found = (np.load(folder / f"{n}.npz") for n in ("uninterrupted", name))
    names = set(found.files)
    assert names and names <= set(expected.files)
    for key in names:
        np.testing.assert_allclose(
            found[key], expected[key], rtol=0, atol=TOLERANCE, err_msg=f"{name}: {key}"
        )


@pytest.mark.timeout(0)
def test_other_numbers_of_ranks_go_on(tmp_path):
    """Losses of the remaining steps, weights and complete state, in float64."""
    run(4, "save", tmp_path)
    for moment in ("epoch", "step"):
        assert (tmp_path / f"{moment}.keras").exists()
    for size in (2, 3):
        run(size, "go_on", tmp_path)
        for moment in ("epoch", "step"):
            require_equal(tmp_path, f"{size}-{moment}")
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
        require_equal(tmp_path, f"plain-{moment}")


@pytest.mark.timeout(0)
def test_a_backup_goes_on_with_fewer_ranks(tmp_path):
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
