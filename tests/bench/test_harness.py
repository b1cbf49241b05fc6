"""The harness, and the cells of each suite."""

import dataclasses
import json

from benchmarks import harness
from benchmarks.cells import FULL, QUICK, SUITES, TABLE, Choice
from benchmarks.harness import merge
from tests.bench.fakes import CELLS


def test_systems_take_turns_to_and_fro(fake_runs, tmp_path):
    cells = [CELLS[0], CELLS[1], dataclasses.replace(CELLS[2], most_rounds=1)]
    harness.measure(cells, 3, tmp_path / "results.json", 1.0, lambda line: None)
    first, second, once = (cell.system for cell in cells)
    assert fake_runs == [first, second, once, second, first, first, second]


def test_the_slowest_rank_counts(tmp_path):
    for rank, samples in enumerate(([1.0, 5.0], [2.0, 3.0])):
        content = {"samples": {"a": samples}, "peak_bytes": rank, "start_s": 2 - rank, "facts": {}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    merged = merge(tmp_path, 2)
    assert merged["samples"] == {"a": [2.0, 5.0]}
    assert (merged["peak_bytes"], merged["start_s"]) == (1, 2)


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
    plain = {"tfscale-local8": "8", "tfscale-local16": "16"}
    overlapped = {"tfscale-local4-overlap": "4", "tfscale-local8-overlap": "8"}
    assert blocks == plain | overlapped | {f"{s}-bf16": block for s, block in plain.items()}
