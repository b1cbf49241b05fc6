"""The simulator says what the papers print, and its page is that of the sources."""

from pathlib import Path

import pytest

from benchmarks import thesis_scaling as study

PAGE = Path(__file__).parents[2] / "docs" / "thesis-scaling.md"


@pytest.mark.parametrize("row", study.named_rows(), ids=lambda row: row[0])
def test_residuals_of_the_six_speedups(row):
    _, printed, simulated, _ = row
    assert abs(float(simulated) / float(printed) - 1) <= 0.16


def test_the_best_k_and_f_are_those_of_the_thesis():
    assert [row[1] == row[2] for row in study.sweep_rows()] == [True, True]


def test_auto_is_a_fifth_faster_and_within_its_bound():
    for row in study.auto_rows():
        own_ms, times, bound_ms = (float(row[i]) for i in (2, 3, 4))
        assert times >= 1.2
        assert own_ms >= bound_ms


def test_the_committed_page_is_up_to_date():
    """Write it again with `make thesis-scaling`."""
    assert PAGE.read_text() == study.page()
