"""The recipes' smallest size, as a user runs them: alone, and on two ranks by `tfscale run`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfscale
from tests.helpers.environment import QUIET

RECIPES = Path(__file__).parents[2] / "recipes"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

_needs_fashion_mnist = pytest.mark.skipif(
    not FASHION_MNIST.is_dir(), reason="Debian's package dataset-fashion-mnist is missing"
)
# Recipe, metric, and the least it must have reached after the last epoch: three times what
# guessing gives for ResNet, 1 dB above the corrupted input for EDSR.
SMOKE = [
    pytest.param("edsr", "val_psnr", 23.0, id="edsr"),
    pytest.param("resnet", "val_accuracy", 0.3, id="resnet", marks=_needs_fashion_mnist),
]
LOAD_WITHOUT_TFSCALE = """
import sys
sys.modules["tfscale"] = None
import keras
model = keras.models.load_model(sys.argv[1])
print(int(model.optimizer.iterations))
"""


def _run(*command):
    found_here = str(Path(tfscale.__file__).parents[1])  # The sources, or where it is installed.
    environment = {**os.environ, **QUIET, "PYTHONPATH": found_here}
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("recipe", "metric", "least"), SMOKE)
def test_smoke(recipe, metric, least, ranks, tmp_path):
    launch = ["-m", "tfscale.cli", "run", "-np", ranks, sys.executable] if ranks > 1 else []
    script = [RECIPES / f"{recipe}.py", "--smoke"]
    output = _run(*launch, *script, "--run-dir", tmp_path, "--data-dir", tmp_path / "data")

    folder = tmp_path / recipe
    settings = json.loads((folder / "run.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert settings["ranks"] == ranks
    assert [line["epoch"] for line in lines] == list(range(1, settings["epochs"] + 1))
    assert lines[-1][metric] > least
    assert output.count("Results are in") == 1  # Rank 0 only.
    pictures = {"learning_curve.png"} | ({"restored.png"} if recipe == "edsr" else set())
    assert {path.name for path in folder.glob("*.png")} == pictures
    if ranks == 1:
        return  # What follows starts TensorFlow once more, and differs with many ranks if at all.
    steps = int(_run("-c", LOAD_WITHOUT_TFSCALE, folder / "model.keras").splitlines()[-1])
    assert steps == settings["epochs"] * {"edsr": 50, "resnet": 20}[recipe]
