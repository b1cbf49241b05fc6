"""Runs of a study: what is run, what is not run again, what folders note, how runs are ended."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import study_report
import study_runs
import study_subprocess

from tests.helpers import fake_study
from tests.helpers.fake_study import STUDY
from tests.helpers.killed_job import is_alive

RECIPES = Path(study_runs.__file__).parent
DEADLINE_S = 60.0
# Tells its process, then takes its time.
SLOW = """
import os, time
from pathlib import Path
path = Path(__file__).with_name("pid")
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(120)  # beyond DEADLINE_S: only a signal ends it in time; and no orphan stays for ever
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs, "RECIPES", tmp_path)
    return study_runs.load(fake_study.write(tmp_path))


@pytest.fixture
def every(study, tmp_path):
    return list(study_runs.runs(study, tmp_path / "runs" / "mine"))


def _fail(run, tmp_path):
    """Begin a run, and let it fail after its last epoch."""
    (tmp_path / "fail").touch()
    assert not study_runs.finish(run)
    (tmp_path / "fail").unlink()
    (run.folder / "backup").mkdir()


def test_runs_are_configurations_times_seeds(every):
    names = ["small-batch-seed1", "large-16-seed1", "small-batch-seed2", "large-16-seed2"]
    assert [run.folder.name for run in every] == names
    assert study_runs.command(every[1]) == [
        "recipes/fake.py", "--epochs=3", "--noaugment", "--batch_size=16", "--report", "--seed=1",
    ]  # fmt: skip


def test_what_is_finished_is_not_run_again_and_other_flags_replace_the_folder(every, tmp_path):
    assert all(study_runs.finish(run) for run in every for _ in range(2))
    (every[1].folder / "backup").mkdir()
    (tmp_path / "mine.py").write_text(STUDY.replace("16,", "32,"))
    changed = list(
        study_runs.runs(study_runs.load(str(tmp_path / "mine.py")), every[0].folder.parent)
    )
    assert [study_runs.is_finished(run) for run in changed] == [True, False, True, False]
    assert study_runs.finish(changed[1]) and not (every[1].folder / "backup").exists()
    assert [(run.folder / "calls").read_text() for run in changed] == ["x"] * 4


def test_a_failed_run_is_no_outcome_and_is_taken_up_again(study, every, tmp_path, capsys):
    run = every[0]
    _fail(run, tmp_path)
    assert "exit code 3" in capsys.readouterr().out
    assert study_runs.outcomes(study, run.folder.parent) == []
    assert study_runs.finish(run) and (run.folder / "backup").exists()
    (outcome,) = study_runs.outcomes(study, run.folder.parent)
    assert len(outcome.made) == 2  # parts: what the failed one has trained counts


@pytest.mark.parametrize("text", ['{"key": "2 reci', "[]", '{"commit": "abc"}', None, "a folder"])
def test_a_folder_is_not_replaced_where_its_flags_are_unknown(every, tmp_path, text):
    run = every[0]
    _fail(run, tmp_path)
    path = run.folder / "study.json"
    path.unlink()
    if text == "a folder":
        path.mkdir()  # an OSError, for root as well
    elif text is not None:
        path.write_text(text)
    for refuse in (study_runs.finish, study_runs.is_finished):
        with pytest.raises(SystemExit, match=r"Received: .*study\.json"):
            refuse(run)
    assert (run.folder / "backup").exists()


def test_a_study_runs_committed_files_only(monkeypatch):
    made = {"commit": "abc+"}
    monkeypatch.setattr(study_runs.provenance, "describe", lambda: made)
    with pytest.raises(SystemExit, match="--dirty"):
        study_runs.require_commit(may_differ=False)
    study_runs.require_commit(may_differ=True)
    made["commit"] = "abc"
    study_runs.require_commit(may_differ=False)


def _study_words(tmp_path, *words):
    script = [sys.executable, str(RECIPES / "study.py"), str(tmp_path / "mine.py"), "--dirty"]
    folders = [f"--{name}_dir={tmp_path / name}" for name in ("runs", "results")]
    return [*script, *words, folders[0].replace("runs_dir", "run_dir"), folders[1]]


def test_only_what_the_results_lack_is_run_when_they_are_kept(study, every, tmp_path):
    def call(*words):
        done = subprocess.run(_study_words(tmp_path, *words), capture_output=True, text=True)
        return done.returncode, done.stderr, json.loads(path.read_text())["runs"]

    assert all(study_runs.finish(run) for run in every)
    path = tmp_path / "results" / "mine.json"
    path.parent.mkdir()
    outcomes = study_runs.outcomes(study, every[0].folder.parent)
    study_report.write(study, outcomes[:2], path.with_suffix(""), "")
    for run in (*every[:2], every[3]):
        shutil.rmtree(run.folder)

    # study.py has no recipe of this name, so that whatever it runs fails.
    code, _, rows = call("--keep", "--seeds", "1")
    assert code == 0 and [row["command"][-1] for row in rows] == ["1", "1", "2"]
    assert not any(run.folder.exists() for run in every[:2])
    code, said, _ = call("--keep")
    assert code == 1 and "1 runs failed, 3 are there." in said
    code, _, rows = call("--draw")
    assert code == 0 and len(rows) == 1


def _wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _hear_interrupts():
    """Background jobs of a shell, as tests may be, inherit that these signals are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def slow(tmp_path):
    """A study that waits for its first run, and the process of that."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "mine.py").write_text(STUDY.replace('"fake"', repr(str(tmp_path / "slow"))))
    with subprocess.Popen(_study_words(tmp_path), preexec_fn=_hear_interrupts) as study:
        _wait_for((tmp_path / "pid").exists)
        yield study, int((tmp_path / "pid").read_text())
        study.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_study_ends_its_run(slow, number):
    study, pid = slow
    study.send_signal(number)
    assert study.wait(DEADLINE_S) == 128 + number
    assert not is_alive(pid)


def test_a_run_that_outlives_its_killed_study_keeps_others_out(slow, tmp_path):
    study, pid = slow
    try:
        study.kill()
        study.wait()
        with pytest.raises(SystemExit, match="is still there"):
            study_subprocess.only_one(tmp_path / "runs" / "mine").__enter__()
    finally:
        os.kill(pid, signal.SIGKILL)
    _wait_for(lambda: not is_alive(pid))
    with study_subprocess.only_one(tmp_path / "runs" / "mine"):
        pass
