"""Runs of a study: what their folders note, who may work in them, and how they are ended."""

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
def run(study, tmp_path):
    run, *_ = study_runs.runs(study, tmp_path / "runs")
    return run


def _fail(run, tmp_path, monkeypatch, commit):
    """Begin a run on some commit, and let it fail after its last epoch."""
    (tmp_path / "fail").touch()
    _set_commit(monkeypatch, commit)
    assert not study_runs.finish(run)
    (tmp_path / "fail").unlink()
    (run.folder / "backup").mkdir(exist_ok=True)


def _set_commit(monkeypatch, commit):
    made = {"commit": commit, "machine": "2 cores", "load": "0.5", "versions": "Python 3"}
    monkeypatch.setattr(study_runs.provenance, "describe", lambda: made)


@pytest.mark.parametrize(
    "text", ["", '{"key": "2 reci', "[]", '{"commit": "abc"}', None, "a folder"]
)
def test_a_folder_is_not_replaced_where_its_flags_are_unknown(run, tmp_path, monkeypatch, text):
    _fail(run, tmp_path, monkeypatch, "first")
    path = run.folder / "study.json"
    path.unlink()
    if text == "a folder":
        path.mkdir()  # an OSError, for root as well
    elif text is not None:
        path.write_text(text)
    for refuse in (study_runs.finish, study_runs.is_finished):
        with pytest.raises(SystemExit, match=r"Received: .*study\.json: .*Restore .* or move"):
            refuse(run)
    assert (run.folder / "backup").exists()


def test_a_study_runs_committed_files_only(monkeypatch):
    _set_commit(monkeypatch, "abc+")
    with pytest.raises(SystemExit, match=r"Received: changes after commit abc\. .* pass --dirty"):
        study_runs.require_commit(may_differ=False)
    study_runs.require_commit(may_differ=True)
    _set_commit(monkeypatch, "abc")
    study_runs.require_commit(may_differ=False)


def test_folders_of_other_flags_go_as_a_whole(run, tmp_path, monkeypatch):
    _fail(run, tmp_path, monkeypatch, "first")
    (run.folder / "study.json").write_text('{"key": "1 recipes/fake.py --epochs=9"}')
    assert study_runs.finish(run) and not (run.folder / "backup").exists()


def _study(tmp_path, *words):
    script = [
        sys.executable,
        str(RECIPES / "study.py"),
        fake_study.write(tmp_path),
        "--dirty",
        *words,
    ]
    done = subprocess.run(
        [*script, f"--run_dir={tmp_path / 'runs'}", f"--results_dir={tmp_path / 'results'}"],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


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


def _wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _pid(tmp_path):
    _wait_for((tmp_path / "pid").exists)
    return int((tmp_path / "pid").read_text())


@pytest.fixture
def slow_study(tmp_path):
    """A study that waits for its first run."""
    (tmp_path / "slow.py").write_text(SLOW)
    path = Path(fake_study.write(tmp_path))
    path.write_text(path.read_text().replace('"fake"', repr(str(tmp_path / "slow"))))
    words = [
        sys.executable,
        RECIPES / "study.py",
        path,
        "--dirty",
        f"--run_dir={tmp_path / 'runs'}",
    ]
    with subprocess.Popen(words, preexec_fn=_hear_interrupts) as study:
        yield study
        study.kill()


def _hear_interrupts():
    """Background jobs of a shell, as tests may be, inherit that these signals are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_study_ends_its_run(slow_study, tmp_path, number):
    pid = _pid(tmp_path)
    slow_study.send_signal(number)
    assert slow_study.wait(DEADLINE_S) == 128 + number
    assert not _is_there(pid)


def test_a_run_that_outlives_its_killed_study_keeps_others_out(slow_study, tmp_path):
    pid = _pid(tmp_path)
    try:
        slow_study.kill()
        slow_study.wait()
        with pytest.raises(SystemExit, match="a run that it has started, is still there"):
            study_subprocess.only_one(tmp_path / "runs" / "mine").__enter__()
    finally:
        os.kill(pid, signal.SIGKILL)
    _wait_for(lambda: not _is_there(pid))
    with study_subprocess.only_one(tmp_path / "runs" / "mine"):
        pass
