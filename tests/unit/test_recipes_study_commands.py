"""study.py as a command: what it refuses, and what it runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import study_report
import study_runs
import study_subprocess

from tests.helpers import fake_study

RECIPES = Path(study_runs.__file__).parent


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs, "RECIPES", tmp_path)
    return study_runs.load(fake_study.write(tmp_path))


def _study(tmp_path, *words):
    script = [sys.executable, str(RECIPES / "study.py"), fake_study.write(tmp_path), *words]
    done = subprocess.run(
        [*script, f"--run_dir={tmp_path / 'runs'}", f"--results_dir={tmp_path / 'results'}"],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def test_study_refuses_what_is_not_there_second_studies_and_unreadable_notes(tmp_path):
    code, said = _study(tmp_path, "--only", "typo")
    assert code == 1 and "Choose from: small batch; Large: 16" in said
    with study_subprocess.only_one(tmp_path / "runs" / "mine"):
        code, said = _study(tmp_path)
    assert code == 1 and "Only one study.py may run in" in said
    folder = tmp_path / "runs" / "mine" / "large-16-seed2"  # the last one: told before the first
    folder.mkdir()
    (folder / "study.json").write_text("")
    code, said = _study(tmp_path)
    assert code == 1 and "large-16-seed2/study.json" in said
    assert not (folder.parent / "small-batch-seed1").exists()


def test_only_what_the_results_lack_is_run_when_they_are_kept(study, tmp_path):
    every = list(study_runs.runs(study, tmp_path / "runs" / "mine"))
    assert all(study_runs.finish(run) for run in every)
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "mine.json"
    kept, own = every[:2], every[2]
    outcomes = study_runs.outcomes(study, tmp_path / "runs" / "mine")
    study_report.write(study, outcomes[:2], path.with_suffix(""), "")
    for run in every:
        if run != own:
            shutil.rmtree(run.folder)

    # study.py has no recipe of this name, so that whatever it runs fails.
    assert _study(tmp_path, "--keep", "--seeds", "1")[0] == 0
    rows = json.loads(path.read_text())["runs"]
    assert [row["command"][-1] for row in rows] == ["1", "1", "2"]
    assert not any(run.folder.exists() for run in kept)
    code, said = _study(tmp_path, "--keep")
    assert code == 1 and "1 runs failed, 3 are there." in said
    code, said = _study(tmp_path, "--draw")
    assert code == 0 and len(json.loads(path.read_text())["runs"]) == 1
