"""Horovod's own launcher, over MPI and Gloo: a recipe, a script made for Horovod, collectives.

Ranks run this file, too: the cases of tests/parallel/cases_collectives_*.py, without MPI.
"""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfscale
from tests.helpers.cases import find_cases
from tests.helpers.environment import QUIET
from tfscale.testing import inspect

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).parent / "keras_mnist.py"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
HOROVOD_IMPORT = "import horovod.tensorflow.keras as hvd"
# Which backend "auto" must choose under the launcher.
LAUNCHES = {"mpi": ([], "engine"), "gloo": (["--gloo"], "horovod")}


def find_horovodrun() -> Path | None:
    """Return Horovod's launcher, as `make horovod` installs it."""
    try:
        files = importlib.metadata.distribution("horovod").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(os.path.abspath(str(f.locate()))) for f in files if f.name == "horovodrun"]
    return found[0] if found and found[0].exists() else None


HOROVODRUN = find_horovodrun()
pytestmark = [
    pytest.mark.skipif(HOROVODRUN is None, reason="Horovod is not installed: make horovod"),
    pytest.mark.timeout(300),
]
both_launches = pytest.mark.parametrize("launch", LAUNCHES)


def start(launch, *command, size=2, **variables):
    # The sources, or where it is installed; and the tests.
    found_here = os.pathsep.join([str(Path(tfscale.__file__).parents[1]), str(ROOT)])
    words = [*LAUNCHES[launch][0], "-np", size, sys.executable, *command]
    return subprocess.run(
        [str(HOROVODRUN), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **QUIET, "PYTHONPATH": found_here, **variables},
    )


def horovodrun(launch, *command, **options):
    done = start(launch, *command, **options)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@both_launches
@pytest.mark.skipif(
    not FASHION_MNIST.is_dir(), reason="Debian's package dataset-fashion-mnist is missing"
)
@pytest.mark.parametrize("options", [[], ["--exchange", "sharded"]], ids=["plain", "sharded"])
def test_resnet_trains(launch, tmp_path, options):
    recipe = ROOT / "recipes" / "resnet.py"
    horovodrun(launch, recipe, "--smoke", "--run-dir", tmp_path, *options)
    folder = tmp_path / "resnet"
    assert json.loads((folder / "run.json").read_text())["ranks"] == 2
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_accuracy"] > 0.3  # Guessing gives 0.1.


@both_launches
def test_a_script_made_for_horovod_runs(launch, tmp_path):
    text = EXAMPLE.read_text()
    assert text.count("horovod.") == 1
    script = tmp_path / "train.py"
    probe = (
        "\nfrom tfscale.testing import inspect\n"
        "print(f'backend {inspect.backend_name()}', flush=True)\n"
    )
    script.write_text(text.replace(HOROVOD_IMPORT, "import tfscale.keras as hvd") + probe)
    output = horovodrun(launch, script, tmp_path)
    accuracies = re.findall(r"of 2: test accuracy ([\d.]+)", output)
    assert len(accuracies) == 2 and len(set(accuracies)) == 1, output
    assert float(accuracies[0]) > 0.9, output
    assert f"backend {LAUNCHES[launch][1]}" in output
    assert sorted(p.name for p in tmp_path.glob("*.keras")) == [
        f"checkpoint-{epoch}.keras" for epoch in range(1, 5)
    ]


FAILING = """
import time
import tensorflow as tf
import tfscale
from tfscale.testing import inspect

tfscale.init()
assert inspect.backend_name() == "horovod"

@tf.function
def step(x):
    return tfscale.allreduce(x)

for number in range(100):
    step(tf.ones([4]))
    if tfscale.rank() == 1 and number == 3:
        raise ValueError("rank one fails here")
# A rank that gets here would keep the job alive: the failing rank must end it.
time.sleep(600)
"""


@both_launches
def test_a_failing_rank_ends_the_job(launch, tmp_path):
    """Also where ranks wait for it in one of Horovod's ops."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = start(launch, script, TFSCALE_BACKEND="horovod")
    assert done.returncode != 0
    assert "rank one fails here" in done.stdout + done.stderr


def test_collectives_where_there_is_no_mpi():
    output = horovodrun("gloo", "-m", __name__, size=3)
    assert output.count("backend horovod .") == 3
    assert all(f"rank {rank} has run" in output for rank in range(3))


def main() -> None:
    """Run the collectives that Horovod can pass; print their number."""
    tfscale.init()
    print(f"backend {inspect.backend_name()} .", flush=True)
    cases = [c for c, size, _ in find_cases() if "collectives_" in c and size == tfscale.size()]
    for case in cases:
        module, _, name = case.partition(":")
        function = getattr(importlib.import_module(module), name)
        if not hasattr(function, "engine_only"):
            function()
            tfscale.barrier()
            inspect.forget_process_sets()
    print(f"rank {tfscale.rank()} has run {len(cases)} cases .", flush=True)


if __name__ == "__main__":
    main()
