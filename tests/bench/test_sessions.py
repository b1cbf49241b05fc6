"""Sessions: what continues, what is measured again, and which runs are pairs."""

import dataclasses
import json
import os

import pytest

from benchmarks import harness, provenance, sessions
from benchmarks.markdown import ratio_of
from benchmarks.rows import collect
from tests.bench.fakes import CELLS


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


def test_an_interrupted_measurement_goes_on(fake_runs, measure, monkeypatch):
    def interrupted(cell, timeout_s):
        if len(fake_runs) == 2:
            raise KeyboardInterrupt
        return fake_runs.run_cell(cell, timeout_s)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(harness, "run_cell", interrupted)
        measure(CELLS)
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


def test_rounds_before_and_after_a_commit_are_no_pairs(fake_runs, measure, monkeypatch):
    def committing(cell, timeout_s):
        fake_runs.commit = "def" if len(fake_runs) == 2 else fake_runs.commit
        return fake_runs.run_cell(cell, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(harness, "run_cell", committing)
        _, content = measure(CELLS, 2)
    (row,) = collect(content["runs"], "step")
    assert ratio_of(row, "horovod", "tfscale-allreduce").n == 1
    # A later commit, measured within the session, does nothing for the earlier one.
    fake_runs.commit = "abc"
    ran, content = measure(CELLS, 2)
    assert ran == ["horovod", *SYSTEMS[::-1]]
    assert len(content["runs"]) == 6


def test_a_file_is_whole_when_its_writer_dies(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "results.json"
    sessions.write(path, {"runs": [1]})

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sessions.write(path, {"runs": [1, 2]})
    assert json.loads(path.read_text()) == {"runs": [1]}
