"""Runs of a study: what their folders note, who may work in them, and how they are ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import provenance
import study_metadata
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
# Waits for a command that does not hear SIGTERM.
PATIENT = """
import sys
from pathlib import Path
sys.path.insert(0, {recipes!r})
import study_subprocess
study_subprocess.PATIENCE_S = (0.5, 0.5)
study_subprocess.end_on_signals()
study_subprocess.call([sys.executable, {deaf!r}], Path({deaf!r}).with_suffix(".log"))
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
    monkeypatch.setattr(provenance, "describe", lambda: made)


def test_a_run_in_parts_names_every_commit(run, study, tmp_path, monkeypatch):
    _fail(run, tmp_path, monkeypatch, "first")
    assert "parts" not in study_metadata.read(run.folder)
    _set_commit(monkeypatch, "second")
    assert study_runs.finish(run) and (run.folder / "backup").exists()
    note = study_metadata.read(run.folder)
    assert note["commit"] == "second"  # as ever, for those who know no parts
    assert [part["commit"] for part in note["parts"]] == ["first", "second"]
    outcomes = study_runs.outcomes(study, tmp_path / "runs")
    text = study_report.write(study, outcomes, tmp_path / "mine")
    assert "* Commit: first; second" in text
    (told,) = json.loads((tmp_path / "mine.json").read_text())["runs"]
    assert told["commit"] == "second" and len(told["parts"]) == 2


def test_an_attempt_without_an_epoch_has_made_nothing(run, tmp_path, monkeypatch):
    _fail(run, tmp_path, monkeypatch, "first")
    (run.folder / "metrics.jsonl").write_text("")
    _set_commit(monkeypatch, "second")
    assert study_runs.finish(run)
    assert study_metadata.parts(study_metadata.read(run.folder)) == [provenance.describe()]


def test_notes_without_parts_are_read(run, tmp_path, monkeypatch):
    _fail(run, tmp_path, monkeypatch, "first")
    path = run.folder / "study.json"
    path.write_text(json.dumps({"key": study_runs._key(run), "commit": "old", "load": 1}))
    _set_commit(monkeypatch, "new")
    assert study_runs.finish(run)
    parts = study_metadata.parts(study_metadata.read(run.folder))
    assert parts == [{"commit": "old", "load": "1"}, provenance.describe()]


@pytest.mark.parametrize("text", ["", '{"key": "2 reci', "[]", '{"commit": "abc"}', None])
def test_a_folder_is_not_replaced_where_its_flags_are_unknown(run, tmp_path, monkeypatch, text):
    _fail(run, tmp_path, monkeypatch, "first")
    path = run.folder / "study.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    for refuse in (study_runs.finish, study_runs.is_finished):
        with pytest.raises(SystemExit, match=r"Received: .*study\.json: .*Restore .* or move"):
            refuse(run)
    assert (run.folder / "backup").exists()


def test_a_note_that_cannot_be_read_is_no_other_key(run, tmp_path, monkeypatch):
    _fail(run, tmp_path, monkeypatch, "first")
    (run.folder / "study.json").unlink()
    (run.folder / "study.json").mkdir()  # an OSError, for root as well
    with pytest.raises(SystemExit, match="Is a directory"):
        study_runs.finish(run)
    assert (run.folder / "backup").exists()


def test_the_note_is_whole_while_it_is_written(run, tmp_path, monkeypatch):
    _fail(run, tmp_path, monkeypatch, "first")
    before = (run.folder / "study.json").read_text()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study_runs.finish(run)
    assert (run.folder / "study.json").read_text() == before
    monkeypatch.undo()
    (run.folder / "study.json").unlink()  # as if it had been the first one
    for path in run.folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    (run.folder / "study.json.unfinished").write_text(before[:9])  # as a kill leaves it
    assert study_metadata.read(run.folder) == {}


def test_folders_of_other_flags_go_as_a_whole(run, tmp_path, monkeypatch):
    _fail(run, tmp_path, monkeypatch, "first")
    (run.folder / "study.json").write_text('{"key": "1 recipes/fake.py --epochs=9"}')
    assert study_runs.finish(run) and not (run.folder / "backup").exists()


def test_only_one_study_works_in_a_folder(tmp_path):
    with study_subprocess.only_one(tmp_path / "new"), pytest.raises(SystemExit, match="at a time"):
        study_subprocess.only_one(tmp_path / "new").__enter__()
    with study_subprocess.only_one(tmp_path / "new"):
        pass


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
    """Return the process of the slow run once it is there."""
    _wait_for((tmp_path / "pid").exists)
    return int((tmp_path / "pid").read_text())


@pytest.fixture
def slow_study(tmp_path):
    """A study that waits for its first run."""
    (tmp_path / "slow.py").write_text(SLOW)
    path = Path(fake_study.write(tmp_path))
    path.write_text(path.read_text().replace('"fake"', repr(str(tmp_path / "slow"))))
    words = [sys.executable, RECIPES / "study.py", path, f"--run_dir={tmp_path / 'runs'}"]
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


def test_a_run_that_does_not_end_is_killed(tmp_path):
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLOW)
    script = PATIENT.format(recipes=str(RECIPES), deaf=str(deaf))
    with subprocess.Popen([sys.executable, "-c", script]) as study:
        pid = _pid(tmp_path)
        study.terminate()
        assert study.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not _is_there(pid)
