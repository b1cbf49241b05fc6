"""The harness, and the cells of each suite."""

import dataclasses
import json

import pytest

from benchmarks import harness, worker
from benchmarks.cells import (
    FULL,
    QUICK,
    SUITES,
    TABLE,
    TRAINED_MODELS,
    Choice,
    Local,
    parse_local,
)
from benchmarks.harness import merge
from benchmarks.places import parse_place
from tests.bench.fakes import CELLS


def test_systems_take_turns_to_and_fro(fake_runs, tmp_path):
    cells = [CELLS[0], CELLS[1], dataclasses.replace(CELLS[2], most_rounds=1)]
    harness.measure(cells, 3, tmp_path / "results.json", 1.0, lambda line: None)
    first, second, once = (cell.system for cell in cells)
    assert fake_runs == [first, second, once, second, first, first, second]


def test_the_slowest_rank_counts(tmp_path):
    for rank, samples in enumerate(([1.0, 5.0], [2.0, 3.0])):
        content = {"samples": {"a": samples}, "sent_bytes": {"a": float(rank)}, "facts": {}}
        content |= {"peak_bytes": rank, "start_s": 2 - rank}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    merged = merge(tmp_path, 2)
    assert merged["samples"] == {"a": [2.0, 5.0]}
    assert (merged["peak_bytes"], merged["start_s"], merged["sent_bytes"]) == (1, 2, {"a": 1.0})


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
    trained = SUITES["step"](Choice(models=TRAINED_MODELS, places=["250mbit"]))
    assert {c.group for c in trained} == {f"{model} 250mbit" for model in TRAINED_MODELS}
    only = SUITES["step"](Choice(models=["vgg_a"], systems=["compute"]))
    assert {c.system for c in only} == {"compute"}


def test_local_sgd_is_measured_over_whole_intervals():
    cells = SUITES["step"](Choice(FULL, models=["resnet50"], places=["1gbit"]))
    blocks = {c.system: c.arguments[-1] for c in cells if "--block" in c.arguments}
    plain = {"tfscale-local8": "8", "tfscale-local16": "16"}
    overlapped = {"tfscale-local4-overlap": "4", "tfscale-local8-overlap": "8"}
    assert blocks == plain | overlapped | {f"{s}-bf16": block for s, block in plain.items()}
    name = "local8-g2-overlap3"
    choice = Choice(models=["vgg_small_256"], places=["2x2@1gbit"], exchanges=[name])
    (cell,) = (c for c in SUITES["step"](choice) if c.system == f"tfscale-{name}")
    assert cell.arguments[2:] == ("--repeats", "13", "--warmup", "1", "--block", "8")
    found = [parse_local(text, 4) for text in ("local8", name, "local4-overlap", "sharded")]
    assert found == [Local(4, 8, 0), Local(2, 8, 3), Local(4, 4, 3), None]


def test_places_and_their_cells():
    found = {text: parse_place(text) for text in ("memory", "1gbit", "2x4@1gbit", "1x4@memory")}
    counts = {text: (place.n_hosts, place.n_ranks) for text, place in found.items()}
    assert counts == {"memory": (1, 4), "1gbit": (4, 4), "2x4@1gbit": (2, 8), "1x4@memory": (1, 4)}
    assert [place.rate_bits_s for place in found.values()] == [None, 1e9, 1e9, None]
    for text in ("0x2@1gbit", "2x2@memory", "", "2x2@"):
        with pytest.raises(ValueError, match="Example: --places"):
            parse_place(text)
    cells = SUITES["step"](Choice(models=["resnet50"], places=["2x2@1gbit"]))
    assert {c.n_ranks for c in cells} == {4}
    assert {c.place for c in cells} == {"2x2@1gbit", "memory"}
    collectives = SUITES["collectives"](Choice(places=["2x4@1gbit"]))
    assert {c.n_ranks for c in collectives} == {8}
    assert "tcp" in {c.system for c in collectives}


def test_bytes_of_links_are_counted_per_call(monkeypatch):
    counter = iter([1000, 7000])
    monkeypatch.setattr(worker, "link_bytes", lambda: next(counter))
    samples = worker.sample(lambda: None, warmup=1, repeats=2, block=4)
    assert (len(samples.seconds), samples.sent_bytes) == (2, 500.0)
