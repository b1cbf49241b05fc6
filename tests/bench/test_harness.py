"""The harness, the cells of each suite, and the commands that measure them."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import cells, harness, worker
from benchmarks.cells import (
    FULL,
    QUICK,
    SUITES,
    TABLE,
    TRAINED_MODELS,
    Choice,
    Local,
    cells_of,
    lacks_torch,
    parse_local,
)
from benchmarks.places import parse_place
from tests.bench.fakes import CELLS


def systems(*suites, **choice):
    return [cell.system for cell in cells_of(suites, Choice(**choice))]


def test_systems_take_turns_to_and_fro(fake_runs, tmp_path):
    cells = [CELLS[0], CELLS[1], dataclasses.replace(CELLS[2], most_rounds=1)]
    harness.measure(cells, 3, tmp_path / "results.json", 1.0, lambda line: None)
    first, second, once = (cell.system for cell in cells)
    assert fake_runs == [first, second, once, second, first, first, second]


def test_the_slowest_rank_counts(tmp_path):
    for rank, samples in enumerate(([1.0, 5.0], [2.0, 3.0])):
        content = {"samples": {"a": samples}, "sent_bytes": {"a": float(rank)}, "facts": {}}
        content |= {"peak_bytes": rank, "start_s": 2 - rank, "idle_share": 0.5 - 0.1 * rank}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    merged = harness.merge(tmp_path, 2)
    assert merged["samples"] == {"a": [2.0, 5.0]}
    assert (merged["peak_bytes"], merged["start_s"], merged["sent_bytes"]) == (1, 2, {"a": 1.0})
    assert merged["idle_share"] == 0.4
    assert harness.merge(tmp_path, 2, slow_motion=2)["samples"] == {"a": [1.0, 2.5]}


def test_every_suite_compares_systems_within_its_groups():
    for extent in (QUICK, TABLE, FULL):
        for suite in ("step", "fc1", "gathers", "keras"):
            cells = SUITES[suite](Choice(extent))
            for group in {cell.group for cell in cells}:
                assert len({cell.system for cell in cells if cell.group == group}) >= 2
            assert len({cell.key for cell in cells}) == len(cells)


def test_a_choice_of_cells(monkeypatch):
    assert {c.place for c in cells_of(["step"], Choice(places=["memory"]))} == {"memory"}
    chosen = systems("step", models=["vgg_a"], exchanges=["auto"], places=["1gbit"])
    assert {*chosen} >= {"compute", "tfscale-auto", "tfscale-auto-fit", "mwms"}
    trained = cells_of(["step"], Choice(models=TRAINED_MODELS, places=["250mbit"]))
    assert {c.group for c in trained} == {f"{model} 250mbit" for model in TRAINED_MODELS}
    chosen = systems("step", "fc1", systems=["compute", "mpi"], places=["1gbit"], models=["vgg_a"])
    assert {*chosen} >= {"compute", "mpi"}
    # Of other exchanges than the suite's own; of PyTorch only where it is asked for.
    sharded = {"systems": ["tfscale-sharded"], "places": ["memory"]}
    assert {*systems("step", **sharded, exchanges=["sharded"])} == {"tfscale-sharded"}
    with pytest.raises(ValueError, match="tfscale-sharded"):
        systems("step", **sharded)
    torch = {"systems": ["compute", "ddp"], "places": ["1gbit"], "models": ["resnet50"]}
    monkeypatch.setattr(cells, "has_ddp", lambda: True)
    assert systems("step", **torch) == ["compute", "ddp"]
    assert not lacks_torch(["step"], Choice(**torch))
    monkeypatch.setattr(cells, "has_ddp", lambda: False)
    assert systems("step", **torch) == ["compute"]
    assert lacks_torch(["step"], Choice(**torch)) and lacks_torch(["step"], Choice(FULL))
    assert not lacks_torch(["step"], Choice(FULL, systems=["compute"]))
    assert not lacks_torch(["step"], Choice()) and not lacks_torch(["fit"], Choice(**torch))


def test_local_sgd_is_measured_over_whole_intervals():
    cells = cells_of(["step"], Choice(FULL, models=["resnet50"], places=["1gbit"]))
    blocks = {c.system: c.arguments[-1] for c in cells if "--block" in c.arguments}
    plain = {"tfscale-local8": "8", "tfscale-local16": "16"}
    overlapped = {"tfscale-local4-overlap": "4", "tfscale-local8-overlap": "8"}
    assert blocks == plain | overlapped | {f"{s}-bf16": block for s, block in plain.items()}
    name = "local8-g2-overlap3"
    choice = Choice(models=["vgg_small_256"], places=["2x2@1gbit"], exchanges=[name])
    (cell,) = (c for c in cells_of(["step"], choice) if c.system == f"tfscale-{name}")
    assert cell.arguments[2:] == ("--repeats", "13", "--warmup", "1", "--block", "8")
    found = [parse_local(text, 4) for text in ("local8", name, "local4-overlap", "sharded")]
    assert found == [Local(4, 8, 0), Local(2, 8, 3), Local(4, 4, 3), None]
    assert parse_local("local8-g2-sharded", 4) == Local(2, 8, 0, "sharded")
    assert parse_local("local8-g2-overlap-sharded-bf16", 8) == Local(2, 8, 7, "sharded")
    choice = Choice(models=["resnet50"], places=["sleep-4x1@1gbit"], exchanges=["local8-g2"])
    asleep = {c.system: c.arguments for c in cells_of(["step"], choice)}["tfscale-local8-g2"]
    assert asleep[4:] == ("--repeats", "3", "--warmup", "1", "--block", "8")


def test_places_and_their_cells():
    counts = {"memory": (1, 4), "1gbit": (4, 4), "2x4@1gbit": (2, 8), "1x4@memory": (1, 4)}
    places = [parse_place(text) for text in counts]
    assert [(place.n_hosts, place.n_ranks) for place in places] == list(counts.values())
    assert [place.rate_bits_s for place in places] == [None, 1e9, 1e9, None]
    for text in ("0x2@1gbit", "2x2@memory", "", "2x2@"):
        with pytest.raises(ValueError, match="Example: --places"):
            parse_place(text)
    cells = cells_of(["step"], Choice(models=["resnet50"], places=["2x2@1gbit"]))
    assert {(c.n_ranks, c.place) for c in cells} == {(4, "2x2@1gbit"), (4, "memory")}
    cells = cells_of(["keras"], Choice(places=["2x4@1gbit"]))
    assert {(c.n_ranks, c.place) for c in cells} == {(8, "2x4@1gbit"), (8, "memory")}


def test_bytes_of_links_are_counted_per_call(monkeypatch):
    counter = iter([1000, 7000, 7000, 8000])
    monkeypatch.setattr(worker, "link_bytes", lambda: next(counter))
    samples = worker.sample(lambda: None, warmup=1, repeats=2, block=4)
    assert (len(samples.seconds), samples.sent_bytes) == (2, 500.0)
    assert worker.sample(lambda: None, warmup=2, repeats=0) == worker.Samples([], 500.0)


FAKE_PYTHON = """#!/bin/sh
case "$2" in
  benchmarks) {measured}; exit {status} ;;
  benchmarks.report) mkdir -p "$5" && echo the page > "$5/benchmarks-results.md" ;;
esac
"""


@pytest.mark.parametrize(("status", "has_results"), [(0, True), (1, True), (3, False)])
def test_make_bench_reports_whatever_failed(tmp_path, status, has_results):
    """Of runs that went well, of which some failed, or that were refused."""
    (tmp_path / "bench").mkdir()
    fake = tmp_path / "python"
    measured = f"touch {tmp_path}/bench/quick.json" if has_results else ":"
    fake.write_text(FAKE_PYTHON.format(measured=measured, status=status))
    fake.chmod(0o755)
    # `build` counts as done: nothing is compiled.
    words = ["make", "-o", "build", "bench-quick", f"BIN={tmp_path}", f"BENCH={tmp_path}/bench"]
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C"}  # without what a make above has set
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, env=environ, capture_output=True, text=True)
    assert ("the page" in done.stdout) is has_results
    assert (done.returncode == 0) is (status == 0)
    assert status == 0 or f"Error {status}" in done.stderr
