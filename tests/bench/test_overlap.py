"""Overlap by batch, k and f: cases, recorded steps, the table and the picture."""

import pytest

from benchmarks import overlap_tables
from benchmarks.cells import SUITES, Choice
from benchmarks.overlap_cases import CENTRE, VARIED, Case, cases, parse_case
from benchmarks.worker_overlap import steps_of


def test_cases_differ_from_the_centre_in_one_number():
    found = cases()
    assert found[0] == CENTRE and len(set(found)) == len(found)
    for case in found[1:]:
        assert sum(getattr(case, name) != getattr(CENTRE, name) for name in VARIED) == 1
    # The first chunk must have a layer that sends gradients, and leave one of VGG-A's eleven.
    assert all(case.replicated < case.first_chunk < 11 for case in found)
    assert [parse_case(str(case)) for case in found] == found
    with pytest.raises(ValueError, match="b32-k7-f2"):
        parse_case("b32-k7")


def test_each_case_has_processes_of_its_own():
    cells = SUITES["overlap"](Choice())
    assert {(cell.place, cell.n_ranks) for cell in cells} == {("1gbit", 4)}
    assert [cell.arguments[-1] for cell in cells] == list(map(str, cases()))
    assert len({cell.key for cell in cells}) == len(cells)
    (one,) = SUITES["overlap"](Choice(exchanges=["b32-k7-f3"]))
    assert one in cells


def test_first_recorded_steps_of_each_rank_are_left_out():
    rows = [
        {"kind": kind, "rank": rank, "step": step}
        for step in range(3)
        for rank in range(2)
        for kind in ("step", "slot")
    ]
    by_rank = steps_of(rows, 2, 1)
    assert [[row["step"] for row in own] for own in by_rank] == [[1, 2], [1, 2]]
    assert [{row["rank"] for row in own} for own in by_rank] == [{0}, {1}]


def _run(values):
    """Return a run of cases: R of two ranks over steps, seconds of the slowest one."""
    return {
        "overlap_percent": {str(case): ratios for case, (ratios, _) in values.items()},
        "samples": {str(case): seconds for case, (_, seconds) in values.items()},
    }


def test_medians_are_over_steps_and_ranks_share_a_step():
    case = Case(32, 3, 2)
    run = _run({case: ([[0.0, 10.0, 20.0], [20.0, 30.0, 90.0]], [0.1, 0.3, 0.2])})
    found = overlap_tables.measured_of([run, run])[case]
    assert found.ratio[1] == 20.0  # of 10, 20 and 55, twice
    assert found.step_ms[1] == pytest.approx(200.0)
    assert found.n_steps == 6


def test_each_number_is_drawn_with_the_others_at_the_centre(tmp_path):
    values = {case: ([[case.batch, case.first_chunk]] * 2, [0.1, 0.2]) for case in cases()}
    found = overlap_tables.measured_of([_run(values)])
    for name, numbers in VARIED.items():
        assert tuple(value for value, _ in overlap_tables.along(found, name)) == numbers
    lines = overlap_tables.lines_of(found).strip().splitlines()
    assert len(lines) == 2 + sum(map(len, VARIED.values()))
    assert f"| **k = {VARIED['first_chunk'][0]}** | batch = 32, f = 2 |" in "\n".join(lines)
    overlap_tables.draw(found, "title", "commit 0; a machine", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
