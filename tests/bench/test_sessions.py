"""Sessions: what continues, what is measured again, which runs are pairs; what is recorded."""

import dataclasses
import json
import sys

import pytest

from benchmarks import harness, provenance
from benchmarks.launch import RunFailedError
from benchmarks.markdown import ratio_of
from benchmarks.rows import collect
from tests.bench.fakes import CELLS, cell


@pytest.fixture
def measure(fake_runs, tmp_path):
    """Measure into one file; returns what ran, and the content of the file."""

    def measure(cells, n_rounds=1):
        fake_runs.clear()
        content = harness.measure(cells, n_rounds, tmp_path / "r.json", 1.0, lambda line: None)
        assert json.loads((tmp_path / "r.json").read_text()) == content
        return list(fake_runs), content

    return measure


SYSTEMS = [c.system for c in CELLS]


def test_an_interrupted_measurement_goes_on(fake_runs, measure):
    def interrupt_the_third():
        if len(fake_runs) == 2:
            raise KeyboardInterrupt

    fake_runs.act = interrupt_the_third
    with pytest.raises(KeyboardInterrupt):
        measure(CELLS)
    del fake_runs.act
    ran, content = measure(CELLS)
    assert ran == SYSTEMS[2:]
    assert len({run["session"] for run in content["runs"]}) == len(content["sessions"]) == 1
    assert measure(CELLS, 2)[0] == SYSTEMS[::-1]  # a round more, backwards
    assert measure(CELLS, 2)[0] == []


def test_a_failed_run_is_measured_again(measure, monkeypatch):
    failed = {"commit": "abc", "error": "killed", "load": [1.0, 1.0]}
    with monkeypatch.context() as patch:
        patch.setattr(harness, "run_cell", lambda *_: dict(failed))
        measure(CELLS)
    ran, content = measure(CELLS)
    assert ran == SYSTEMS
    assert len(content["runs"]) == 3


def test_another_commit_is_measured_anew(fake_runs, measure):
    measure(CELLS, 2)
    fake_runs.commit = "def"
    ran, content = measure(CELLS)
    assert ran == SYSTEMS
    # Medians are over all runs of a cell: none of the other commit is left.
    assert [run["commit"] for run in content["runs"]] == ["def"] * 3
    assert [s["commit"] for s in content["sessions"].values()] == ["abc", "def"]


def test_other_arguments_and_versions_are_measured_again(measure, monkeypatch):
    measure(CELLS)
    others = [dataclasses.replace(c, arguments=("--model", "vgg", "--repeats", "3")) for c in CELLS]
    ran, content = measure(others)
    assert ran == SYSTEMS
    assert {tuple(run["arguments"]) for run in content["runs"]} == {others[0].arguments}
    before = list(content["sessions"].values())
    monkeypatch.setattr(provenance, "_version", lambda package: "9.9")
    ran, content = measure(others)
    assert ran == SYSTEMS
    *first, second = content["sessions"].values()
    assert first == before and second["versions"]["tensorflow"] == "9.9"


def test_cells_that_are_added_later_are_no_pairs_of_earlier_ones(measure):
    measure(CELLS, 3)
    ran, content = measure([CELLS[2]])
    assert ran == ["horovod"]
    (row,) = collect(content["runs"], "step")
    assert [len(row.rounds[system]) for system in SYSTEMS] == [3, 3, 4]
    assert ratio_of(row, "horovod", "tfscale-allreduce").n == 3


def test_rounds_before_and_after_a_commit_are_no_pairs(fake_runs, measure):
    def commit_meanwhile():
        fake_runs.commit = "def" if len(fake_runs) == 2 else fake_runs.commit

    fake_runs.act = commit_meanwhile
    _, content = measure(CELLS, 2)
    del fake_runs.act
    (row,) = collect(content["runs"], "step")
    assert ratio_of(row, "horovod", "tfscale-allreduce").n == 1
    # A later commit, measured within the session, does nothing for the earlier one.
    fake_runs.commit = "abc"
    ran, content = measure(CELLS, 2)
    assert ran == ["horovod", *SYSTEMS[::-1]]
    assert len(content["runs"]) == 6


# Where results come from.


def test_changes_are_a_commit_of_their_own(monkeypatch, tmp_path):
    """Changes of what git knows, and sources that it does not know."""
    found = {"rev-parse": "abc", "diff": "", "ls-files": "recipes/a.json\0recipes/b.md\0"}
    monkeypatch.setattr(provenance, "_git", lambda *words: found[words[0]])
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == "abc"
    commits = []
    for found["diff"] in ("a line", "another line"):
        commits.append(provenance.commit())
    found["ls-files"] += "study.py\0"
    for text in ("SEEDS = 1", "SEEDS = 2"):
        (tmp_path / "study.py").write_text(text)
        commits.append(provenance.commit())
    assert len(set(commits)) == 4 and all(c.startswith("abc+") for c in commits)


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
