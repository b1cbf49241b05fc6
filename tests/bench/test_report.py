"""The page of results."""

from pathlib import Path

import pytest

from benchmarks import harness, sessions
from benchmarks.report import report
from benchmarks.rows import collect, step_limit
from benchmarks.step_tables import eligible, overhead_table, summary
from tests.bench.fakes import CELLS, run

DOCS = Path(__file__).parents[2] / "docs"


def _row(runs):
    (row,) = collect(runs, "step")
    return row


def _rounds(system, *seconds):
    return [run(system, number, s) for number, s in enumerate(seconds)]


def _summary_of(*runs):
    head, _, line = summary([_row([r for some in runs for r in some])]).splitlines()
    names, cells = ([word.strip() for word in text.split(" | ")] for text in (head, line))
    return dict(zip(names, cells, strict=True))


def test_the_page_names_ratios_and_limits(fake_runs, tmp_path):
    content = harness.measure(CELLS, 2, tmp_path / "results.json", 1.0, lambda line: None)
    row = _row(content["runs"])
    assert step_limit(row, "least_bytes") == 0.1
    assert step_limit(row, "allreduce_bytes") == pytest.approx(0.8)
    page = report(content, "Benchmarks")
    assert "Physical limits: 800 ms with summing up all gradients, 100 ms with the least" in page
    assert "| vgg | 1gbit, 4 ranks | 100 | — | — | — | — | — | allreduce | 1000 |" in page
    assert "| allreduce | 1000 | 2.00, 2 rounds |" in page
    assert "| Horovod | 2000 (2000..2000) | 0.05 |" in page


def test_overhead_of_one_process_pairs_the_blocks():
    where = {"suite": "single", "group": "vgg", "system": "both", "round": 0, "n_ranks": 1}
    for keras, expected in (([1.0, 2.0, 4.0], "range of 3: "), ([1.0] * 5, "")):
        samples = {"keras": keras, "tfscale": [1.1 * s for s in keras]}
        runs = [{**where, "samples": samples, "session": "s", "commit": "abc"}]
        text = overhead_table(collect(runs, "single"), "single")
        assert f"+10.0 % ({expected}+10.0..+10.0)" in text


def test_auto_is_the_headline_and_the_best_fixed_has_no_interval():
    horovod = _rounds("horovod", 2.0, 2.2, 2.4)
    auto, chunked = (_rounds(f"tfscale-{n}", s, s, s) for n, s in (("auto", 1.0), ("chunked", 0.5)))
    line = _summary_of(horovod, auto, chunked)
    assert line["Horovod / auto"] == "2.20 (range of 3: 2.00..2.40)"
    assert (line["auto ms"], line["best fixed"]) == ("1000", "chunked")
    assert line["Horovod / best fixed |"] == "4.40, 3 rounds |"


def test_one_round_does_not_win_against_three():
    horovod = _rounds("horovod", 2.0, 2.2, 2.4)
    auto, slow = (_rounds(f"tfscale-{n}", s, s, s) for n, s in (("auto", 1.0), ("allreduce", 1.9)))
    line = _summary_of(horovod, auto, slow, _rounds("tfscale-sharded", 0.1))
    assert line["best fixed"] == "allreduce"
    line = _summary_of(horovod, slow, _rounds("tfscale-auto", 0.1))
    assert (line["auto ms"], line["Horovod / auto"]) == ("—", "—")
    # Of another session are as many rounds, but none beside Horovod's.
    apart = [run("tfscale-sharded", number, 0.1, session="t") for number in range(3)]
    assert _summary_of(horovod, auto, slow, apart)["best fixed"] == "allreduce"


def test_without_horovod_all_rounds_count():
    slow, lucky = _rounds("tfscale-allreduce", 1.0, 1.0), _rounds("tfscale-sharded", 0.1)
    assert eligible(_row(slow + lucky + _rounds("tfscale-local8", 0.1, 0.1))) == [
        "tfscale-allreduce"
    ]
    assert _summary_of(slow, lucky)["Horovod / best fixed |"] == "— |"


def test_the_committed_page_is_up_to_date():
    """Write it again with `python -m benchmarks.report docs/benchmarks.json --output docs`."""
    page = (DOCS / "benchmarks.md").read_text()
    assert page.endswith("\n" + report(sessions.read(DOCS / "benchmarks.json"), ""))


def test_committed_results_name_no_paths_of_a_machine():
    content = sessions.read(DOCS / "benchmarks.json")
    commands = [one["command"] for one in content["runs"]]
    commands += [one["command"] for one in content["sessions"].values() if "command" in one]
    assert not [word for words in commands for word in words if word.startswith(("/", "--output"))]
    assert not [one for one in content["sessions"].values() if "kernel" in one.get("machine", {})]
