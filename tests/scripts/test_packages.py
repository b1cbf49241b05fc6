"""Scripts with other packages print the same on 2 ranks, and record one run. They need no network.

python -m pip install wandb mlflow keras-tuner  # what is missing is skipped
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import job_words, run_in_folder
from tests.helpers.run_comparison import compare_lines, read_lines

FOLDER = Path(__file__).parent / "packages"
# Package, script, what it leaves once.
CASES = [
    ("wandb", "wandb_run", "wandb/offline-run-*"),
    ("mlflow", "mlflow_run", "mlruns/*/*/metrics/final_loss"),
    ("keras_tuner", "keras_tuner_search", "trials/untitled_project/oracle.json"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("package", "script", "left"), CASES)
def test_a_package_records_one_run(package, script, left, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    home = tmp_path / "keras"
    home.mkdir()
    (home / "keras.json").write_text(json.dumps({"floatx": "float64", "backend": "tensorflow"}))
    environ = {"KERAS_HOME": str(home), "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    found = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        environ["MLFLOW_TRACKING_URI"] = str(folder / "mlruns")
        options = ["--distribute", "--seed", "1", "-np", str(size)]
        words = job_words(options, [sys.executable, str(FOLDER / f"{script}.py")])
        result = run_in_folder(words, folder, 140, environ)
        assert result.exit_code == 0, f"{result.output}\n{result.errors}"
        assert len(list(folder.glob(left))) == 1
        found.append(read_lines(result.output))
    assert compare_lines(*found, 1e-5) == []
