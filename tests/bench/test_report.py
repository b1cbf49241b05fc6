"""The page of results, the numbers on it, and the comparison of two files."""

from pathlib import Path

import pytest
from compare import compare

from benchmarks import harness, numbers, sessions
from benchmarks.cells import Choice, cells_of
from benchmarks.numbers import Ratio, Spread, Weights, paired_ratio, spread
from benchmarks.report import keras_table, report
from benchmarks.rows import collect, step_limit
from benchmarks.speedup_tables import speedup_table
from benchmarks.step_tables import eligible, group_table, overhead_table, summary
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


def test_blocks_of_fit_are_no_pairs():
    where = {"suite": "fit", "group": "vgg", "system": "both", "round": 0, "n_ranks": 4}
    samples = {"train_on_batch": [1.0] * 5, "fit": [1.0, 1.1, 1.2, 1.3, 1.4]}
    runs = [{**where, "samples": samples, "session": "s", "commit": "abc"}]
    assert "| +20.0 % |" in overhead_table(collect(runs, "fit"), "fit")


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


def test_limits_are_those_of_the_links():
    """Computing alone runs in memory, where nothing is sent, and steps in `fit` read input."""
    ours = run("tfscale-auto", 0, 0.5) | {"allreduce_bytes": 1e8, "predicted_s": 0.4}
    fitted = run("tfscale-auto-fit", 0, 0.5) | {"allreduce_bytes": 1e8, "predicted_s": 0.6}
    alone = run("compute", 0, 0.1) | {"allreduce_bytes": 0.0, "place": "memory"}
    for runs in ([ours, fitted, alone], [alone, fitted, ours]):
        row = _row(runs)
        assert step_limit(row, "allreduce_bytes") == pytest.approx(0.8)
        assert row.facts["predicted_s"] == 0.4


def test_without_horovod_all_rounds_count():
    slow, lucky = _rounds("tfscale-allreduce", 1.0, 1.0), _rounds("tfscale-sharded", 0.1)
    row = _row(slow + lucky + _rounds("tfscale-local8", 0.1, 0.1))
    assert eligible(row) == ["tfscale-allreduce"]
    fitted = _rounds("tfscale-auto-fit", 0.1, 0.1)
    assert eligible(_row(slow + fitted)) == ["tfscale-allreduce"]
    assert "| tfscale auto, in fit | 100 (100..100) |" in group_table(_row(slow + fitted))
    assert _summary_of(slow, lucky)["Horovod / best fixed |"] == "— |"


def test_the_committed_page_is_up_to_date():
    """Write it again with `python -m benchmarks.report docs/benchmarks.json --output docs`."""
    page = (DOCS / "benchmarks-results.md").read_text()
    assert page.endswith("\n" + report(sessions.read(DOCS / "benchmarks.json"), ""))


def test_committed_results_name_no_paths_of_a_machine():
    content = sessions.read(DOCS / "benchmarks.json")
    commands = [one["command"] for one in content["runs"]]
    commands += [one["command"] for one in content["sessions"].values() if "command" in one]
    assert not [word for words in commands for word in words if word.startswith(("/", "--output"))]
    assert not [one for one in content["sessions"].values() if "kernel" in one.get("machine", {})]


# Numbers.


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ([2.0, 20.0, 6.0], [1.0, 10.0, 3.0], Ratio(2.0, 2.0, 2.0, 3, is_range=True)),  # a load
        ([2.0, 20.0, 200.0], [1.0, None, 100.0], Ratio(2.0, 2.0, 2.0, 2, is_range=True)),
        ([1.0, 2.0, 3.0, 4.0], [1.0] * 4, Ratio(2.5, 1.0, 4.0, 4, is_range=True)),
        ([1.0, None], [None, 1.0], None),
    ],
)
def test_paired_ratio_is_of_the_rounds_that_both_have(theirs, ours, expected):
    rounds = ({n: [s, s] for n, s in enumerate(every) if s} for every in (theirs, ours))
    assert paired_ratio(*rounds) == expected


def test_paired_ratio_of_many_rounds_has_an_interval_around_its_median():
    theirs = dict(enumerate([[2.0], [2.2], [1.8], [2.4], [2.0]]))
    ratio = paired_ratio(theirs, dict(enumerate([[1.0]] * 5)))
    assert ratio.low < ratio.high and not ratio.is_range
    assert ratio.low <= ratio.median == 2.0 <= ratio.high


def test_bytes_and_rates():
    dense, other = Weights(1_001_000, 1000, 1000), Weights(50)
    assert numbers.allreduce_bytes([dense, other], 4) == 1.5 * 4 * 1_001_050
    assert numbers.least_bytes([dense, other], 4, local_batch=1) == 4 * 3 * 2000 + 1.5 * 4 * 50
    # With a large batch the gradient is the cheaper one.
    assert numbers.least_bytes([dense], 4, local_batch=10**6) == numbers.allreduce_bytes([dense], 4)
    # The limit is the longer of computing and sending.
    assert [numbers.physical_limit(0.1, 1000, rate) for rate in (None, 8e3, 8e6)] == [0.1, 1.0, 0.1]


# The comparison of two files.


def content_of(*seconds, suite="step", system="tfscale-allreduce", case="vgg"):
    run = {"suite": suite, "group": "g", "system": system, "samples": {case: list(seconds)}}
    return {"runs": [run]}


def test_backends_of_keras_stand_side_by_side():
    ours, other = run("keras-tensorflow-sharded", 0, 1.0), run("keras-torch", 0, 2.0)
    runs = [{**one, "suite": "keras", "load": [0.5]} for one in (ours, other)]
    page = keras_table(collect(runs, "keras"))
    assert "| tensorflow-sharded ms | torch ms |" in page
    assert "| 1000 (1000..1000) | 2000 (2000..2000) |" in page


def test_compare_tells_slower_from_noise():
    old = content_of(1.0, 1.1, 1.2)
    assert not compare(old, content_of(1.0, 1.5, 2.0), 0.1)[1]  # spreads overlap
    (line,), is_worse = compare(old, content_of(2.0, 2.1, 2.2), 0.1)
    assert is_worse and line.endswith("SLOWER")
    assert "faster" in compare(old, content_of(0.5, 0.5, 0.5), 0.1)[0][0]


@pytest.mark.parametrize(
    ("suite", "system", "case", "is_ours"),
    [
        ("step", "horovod", "vgg", False),
        ("step", "ddp-fp16", "vgg", False),
        ("collectives", "tcp", "allreduce", False),
        ("step", "in-step", "vgg", True),
        ("single", "both", "tfscale", True),
        ("single", "both", "keras", False),
        ("report", "both", "without", True),
    ],
)
def test_compare_knows_ours(suite, system, case, is_ours):
    old, new = (content_of(s, suite=suite, system=system, case=case) for s in (1.0, 2.0))
    assert compare(old, new, 0.1)[1] is is_ours


def test_one_process_beside_two_ranks():
    cells = cells_of(["speedup"], Choice(models=["lstm"], exchanges=["auto"]))
    ranks = {cell.system: cell.n_ranks for cell in cells if cell.system != "horovod"}
    ranks_of_ours = {"compute": 2, "in-step": 2, "tfscale-auto": 2}
    assert ranks == {"one-core": 1, "both-cores": 1, **ranks_of_ours}
    shares = {cell.system for cell in cells if cell.arguments[-2:] == ("--share", "2")}
    free = {cell.system for cell in cells if "--pin" not in cell.arguments}
    assert shares == {"one-core"} and free == {"both-cores"}
    steps = {"one-core": 0.009, "both-cores": 0.012, "tfscale-auto": 0.01}
    runs = [
        {**one, "suite": "speedup"}
        for system, seconds in steps.items()
        for one in _rounds(system, seconds, seconds)
    ]
    text = speedup_table(collect(runs, "speedup"))
    assert "| 2 ranks, tfscale auto | 10 (10..10) | 0.90 (range of 2: 0.90..0.90) | 1.20" in text
