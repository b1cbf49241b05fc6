"""The harness, the page of results, and the comparison of two files."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.cells import FULL, QUICK, SUITES, TABLE, Choice
from benchmarks.harness import Cell, merge
from benchmarks.places import RunFailedError
from benchmarks.report import report
from benchmarks.rows import collect, step_limit
from benchmarks.step_tables import overhead_table

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from compare import compare


def _cell(system, place="1gbit"):
    return Cell("step", "vgg 1gbit", system, place, 4, ("--model", "vgg"))


@pytest.fixture
def fake_runs(monkeypatch):
    """Runs that take no time; the list says which cells ran, in order."""
    seconds = {"compute": 0.1, "horovod": 2.0, "tfscale-allreduce": 1.0}
    ran = []

    def run_cell(cell, timeout_s):
        ran.append(cell.system)
        found = {"samples": {"vgg": [seconds[cell.system]] * 3}, "bytes": {}, "load": [1.0, 2.0]}
        numbers = {"peak_bytes": 2**30, "start_s": 5.0, "least_bytes": 1e6, "allreduce_bytes": 1e8}
        return {**found, **numbers, "commit": "abc"}

    monkeypatch.setattr(harness, "run_cell", run_cell)
    monkeypatch.setattr(harness, "cluster_for", lambda *_: __import__("contextlib").nullcontext())
    return ran


CELLS = [_cell("compute", "memory"), _cell("tfscale-allreduce"), _cell("horovod")]


def test_systems_take_turns(fake_runs, tmp_path):
    harness.measure(CELLS, 2, tmp_path / "results.json", 1.0, lambda line: None)
    assert fake_runs == ["compute", "tfscale-allreduce", "horovod"] * 2


def test_an_interrupted_measurement_goes_on(fake_runs, tmp_path):
    path = tmp_path / "results.json"
    harness.measure(CELLS[:2], 1, path, 1.0, lambda line: None)
    content = json.loads(path.read_text())
    content["runs"][0]["error"] = "killed"
    path.write_text(json.dumps(content))
    fake_runs.clear()
    content = harness.measure(CELLS, 1, path, 1.0, lambda line: None)
    assert fake_runs == ["compute", "horovod"]
    assert len(content["runs"]) == 3


def test_some_cells_need_fewer_rounds(fake_runs, tmp_path):
    cells = [CELLS[0], dataclasses.replace(CELLS[1], most_rounds=1)]
    content = harness.measure(cells, 3, tmp_path / "results.json", 1.0, lambda line: None)
    seen = [(run["system"], run["round"]) for run in content["runs"]]
    first, second = CELLS[0].system, CELLS[1].system
    assert seen == [(first, 0), (second, 0), (first, 1), (first, 2)]


def test_a_failed_run_is_recorded_with_its_output(monkeypatch):
    def fail(*_):
        raise RunFailedError("exit code 1. Traceback")

    monkeypatch.setattr(harness, "run_ranks", fail)
    assert harness.run_cell(_cell("horovod"), 1.0)["error"] == "exit code 1. Traceback"


def test_the_slowest_rank_counts(tmp_path):
    for rank, samples in enumerate(([1.0, 5.0], [2.0, 3.0])):
        content = {"samples": {"a": samples}, "peak_bytes": rank, "start_s": 2 - rank, "facts": {}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    merged = merge(tmp_path, 2)
    assert merged["samples"] == {"a": [2.0, 5.0]}
    assert (merged["peak_bytes"], merged["start_s"]) == (1, 2)


def test_the_page_names_ratios_and_limits(fake_runs, tmp_path):
    content = harness.measure(CELLS, 2, tmp_path / "results.json", 1.0, lambda line: None)
    (row,) = collect(content["runs"], "step")
    assert step_limit(row, "least_bytes") == 0.1
    assert step_limit(row, "allreduce_bytes") == pytest.approx(0.8)
    page = report(content, "Benchmarks")
    assert "Physical limits: 800 ms with summing up all gradients, 100 ms with the least" in page
    assert "| vgg | 1gbit, 4 ranks | 100 | tfscale allreduce | 1000 | 10% | 2.00 (" in page
    assert "| Horovod | 2000 (2000..2000) | 0.05 |" in page
    assert "abc" in page


def test_every_suite_compares_systems_within_its_groups():
    for extent in (QUICK, TABLE, FULL):
        for suite in ("collectives", "step", "fc1", "gathers"):
            cells = SUITES[suite](Choice(extent))
            for group in {cell.group for cell in cells}:
                assert len({cell.system for cell in cells if cell.group == group}) >= 2
            assert len({cell.key for cell in cells}) == len(cells)


def test_a_choice_of_cells():
    assert {c.place for c in SUITES["step"](Choice(places=["memory"]))} == {"memory"}
    chosen = SUITES["step"](Choice(models=["vgg_a"], exchanges=["auto"], places=["1gbit"]))
    assert {c.system for c in chosen} >= {"compute", "tfscale-auto", "mwms"}
    only = SUITES["step"](Choice(models=["vgg_a"], systems=["compute"]))
    assert {c.system for c in only} == {"compute"}


def test_local_sgd_is_measured_over_whole_intervals():
    cells = SUITES["step"](Choice(FULL, models=["resnet50"], places=["1gbit"]))
    blocks = {c.system: c.arguments[-1] for c in cells if "--block" in c.arguments}
    assert blocks == {"tfscale-local8": "8", "tfscale-local16": "16"}


def test_overhead_of_one_process_pairs_the_blocks():
    samples = {"keras": [1.0, 2.0, 4.0], "tfscale": [1.1, 2.2, 4.4]}
    run = {"suite": "single", "group": "vgg", "system": "both", "round": 0, "n_ranks": 1}
    (row,) = collect([{**run, "samples": samples}], "single")
    assert "+10.0 % (+10.0..+10.0)" in overhead_table([row], "single")


def _content(seconds, system="tfscale-allreduce"):
    run = {"suite": "step", "group": "g", "system": system, "samples": {"vgg": seconds}}
    return {"runs": [run]}


def test_compare_tells_slower_from_noise():
    old = _content([1.0, 1.1, 1.2])
    assert compare(old, _content([1.0, 1.5, 2.0]), 0.1)[1] is False  # spreads overlap
    lines, has_slower = compare(old, _content([2.0, 2.1, 2.2]), 0.1)
    assert has_slower
    assert lines[0].endswith("SLOWER")
    assert compare(_content([2.0], "horovod"), _content([9.0], "horovod"), 0.1)[1] is False
    assert "faster" in compare(old, _content([0.5, 0.5, 0.5]), 0.1)[0][0]
