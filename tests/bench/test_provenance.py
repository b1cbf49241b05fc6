"""What results record about where they come from, and what they do not."""

import sys

import pytest

from benchmarks import harness, provenance
from benchmarks.launch import RunFailedError
from tests.bench.fakes import cell


@pytest.mark.parametrize("changes", ["", "a line", "another line"])
def test_changes_are_a_commit_of_their_own(monkeypatch, changes):
    found = {"rev-parse": "abc", "diff": changes, "ls-files": ""}
    monkeypatch.setattr(provenance, "_git", lambda *words: found[words[0]])
    commit = provenance.commit()
    assert commit == "abc" if not changes else commit.startswith("abc+")
    found["diff"] = "yet another"
    assert provenance.commit() != commit


def test_sources_that_git_does_not_know_are_changes(monkeypatch, tmp_path):
    found = {"rev-parse": "abc", "diff": "", "ls-files": "recipes/a.json\0recipes/b.md\0"}
    monkeypatch.setattr(provenance, "_git", lambda *words: found[words[0]])
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == "abc"
    found["ls-files"] += "study.py\0"
    commits = []
    for text in ("SEEDS = 1", "SEEDS = 2"):
        (tmp_path / "study.py").write_text(text)
        commits.append(provenance.commit())
    assert commits[0] != commits[1] and all(c.startswith("abc+") for c in commits)


def test_no_paths_and_no_kernel_are_recorded(monkeypatch):
    words = ["step", "--output", "/data/me/r.json", "--rounds", "5", "--output=/data/me/r.json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    about = provenance.describe()
    assert about["command"] == ["python", "-m", "benchmarks", "step", "--rounds", "5"]
    assert sorted(about["machine"]) == ["cpu", "memory_bytes", "n_cores"]


def test_a_failed_run_is_recorded_with_its_output_and_its_command(monkeypatch):
    given = []

    def fail(place, size, command, extra, timeout_s):
        given.extend(command)
        raise RunFailedError("exit code 1. Traceback")

    monkeypatch.setattr(harness, "run_ranks", fail)
    result = harness.run_cell(cell("horovod"), 1.0)
    assert result["error"] == "exit code 1. Traceback"
    program = ["-m", "benchmarks.worker_step", "--system", "horovod", "--model", "vgg"]
    assert result["command"] == program
    assert given[1:-1] == [*program, "--output"]
