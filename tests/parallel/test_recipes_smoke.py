"""The recipes' smallest size, as a user runs them: alone, and on two ranks by `tfscale run`.

The pictures are made here, in the layout of the real data sets, so that nothing need be
installed and the loss after 20 steps is known: `WRITE_GOLDEN=1` writes it again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfscale
from tests.helpers.environment import QUIET
from tests.helpers.picture_files import write_idx_set

RECIPES = Path(__file__).parents[2] / "recipes"
GOLDEN = Path(__file__).with_name("golden_losses.json")
# Relative. The order of float32 sums differs between processors; a wrong step shows more.
TOLERANCE = 0.01
# Recipe, metric, and the least it must have reached after the last epoch: three times what
# guessing gives for classes, some points more for clicks, more than the share of blanks of a text,
# 1 dB above the corrupted input for EDSR.
SMOKE = [
    ("characters", "val_accuracy", 0.3),
    ("dlrm", "val_accuracy", 0.56),
    ("edsr", "val_psnr", 23.0),
    ("lenet", "val_accuracy", 0.3),
    ("mlp", "val_accuracy", 0.3),
    ("resnet", "val_accuracy", 0.3),
    ("vgg", "val_accuracy", 0.3),
]
STEPS = {"edsr": 50}  # of an epoch; of the others: 20
LOAD_WITHOUT_TFSCALE = """
import sys
sys.modules["tfscale"] = None
import keras
model = keras.models.load_model(sys.argv[1])
print(int(model.optimizer.iterations))
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, seed in (("mnist", 1), ("fashion-mnist", 2)):
        write_idx_set(folder / name, seed, train=2560, test=512)
    return folder


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


def _train(recipe, ranks, *arguments, script=None):
    launch = (
        ("-m", "tfscale.launcher.cli", "run", "-np", ranks, sys.executable) if ranks > 1 else ()
    )
    return _run(*launch, script or RECIPES / f"{recipe}.py", "--smoke", *arguments)


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("recipe", "metric", "least"), SMOKE)
def test_smoke(recipe, metric, least, ranks, tmp_path, data_dir):
    output = _train(recipe, ranks, "--run-dir", tmp_path, "--data-dir", data_dir)
    folder = tmp_path / recipe
    settings = json.loads((folder / "run.json").read_text())
    lines = _lines(folder)
    assert settings["ranks"] == ranks
    assert [line["epoch"] for line in lines] == list(range(1, settings["epochs"] + 1))
    assert lines[-1][metric] > least
    assert output.count("Results are in") == 1  # Rank 0 only.
    pictures = {"learning_curve.png"} | ({"restored.png"} if recipe == "edsr" else set())
    assert {path.name for path in folder.glob("*.png")} == pictures
    if ranks == 1:
        return  # What follows starts TensorFlow once more, and differs with many ranks if at all.
    steps = int(_run("-c", LOAD_WITHOUT_TFSCALE, folder / "model.keras").splitlines()[-1])
    assert steps == settings["epochs"] * STEPS.get(recipe, 20)


@pytest.mark.parametrize("recipe", [recipe for recipe, _, _ in SMOKE])
def test_loss_of_the_first_20_steps_on_two_ranks_is_the_known_one(recipe, tmp_path, data_dir):
    images = ["--images", 80] if recipe == "edsr" else []  # 80 * 4 patches, 16 a step
    where = ["--run-dir", tmp_path, "--data-dir", data_dir]
    _train(recipe, 2, "--epochs", 1, *images, *where)
    loss = _lines(tmp_path / recipe)[0]["loss"]
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("WRITE_GOLDEN") == "1":
        golden[recipe] = round(loss, 6)
        GOLDEN.write_text(json.dumps(golden, indent=2, sort_keys=True) + "\n")
    assert loss == pytest.approx(golden[recipe], rel=TOLERANCE)


WAYS = {
    "averaging": ["--average-every", 1],
    "chunked": ["--exchange", "chunked:replicated_dense=1,first_chunk_layers=3", "--report"],
    "growing": ["--adaptive-batch", 256, "--adaptive-interval", 1, "--theta-every", 5],
    "groups": ["--groups", 2, "--interval", 4],
    "shards": ["--shuffle", "shards"],
    "sharded": ["--exchange", "sharded"],
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_train(way, tmp_path, data_dir):
    where = ["--run-dir", tmp_path, "--data-dir", data_dir, "--run-name", way]
    _train("lenet", 2, *where, *WAYS[way])
    lines = _lines(tmp_path / way)
    assert len(lines) == 3 and lines[-1]["val_accuracy"] > 0.3
    assert (tmp_path / way / "model.keras").exists()
    assert [line["batch_size"] for line in lines][1:] == [256 if way == "growing" else 128] * 2
    assert (tmp_path / way / "communication.png").exists() == (way == "chunked")
    assert (tmp_path / way / "adaptive.jsonl").exists() == (way == "growing")


def test_a_resumed_run_goes_on_where_it_ended(tmp_path, data_dir):
    whole = ["--run-dir", tmp_path, "--data-dir", data_dir, "--resume"]
    _train("lenet", 2, *whole, "--epochs", 3, "--run-name", "whole")
    stopped = """
import os, sys, keras
sys.argv[0] = {script!r}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import tfscale
begin = tfscale.callbacks.Checkpoint.on_train_batch_begin
def interrupted(self, batch, logs=None):
    begin(self, batch, logs)
    if self._position.epoch == 2:
        raise SystemExit(0)
tfscale.callbacks.Checkpoint.on_train_batch_begin = interrupted
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), {{"__name__": "__main__"}})
"""
    script = tmp_path / "stopped.py"
    script.write_text(stopped.format(script=str(RECIPES / "lenet.py")))
    again = [*whole, "--epochs", 3, "--run-name", "again"]
    _train("lenet", 2, *again, script=script)
    assert [line["epoch"] for line in _lines(tmp_path / "again")] == [1, 2]
    _train("lenet", 2, *again)
    first, second = (_lines(tmp_path / name) for name in ("whole", "again"))
    assert [line["epoch"] for line in second] == [1, 2, 3]
    assert [line["loss"] for line in second] == [line["loss"] for line in first]
