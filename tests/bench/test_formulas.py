"""Formulas and simulations against what was counted and printed, and the pages made of them."""

import json
from pathlib import Path

import pytest

from benchmarks import message_counts
from benchmarks import thesis_scaling as study

DOCS = Path(__file__).parents[2] / "docs"


def test_formulas_of_messages_equal_the_counts_of_the_engine():
    counts = json.loads((DOCS / "message-counts.json").read_text())["sent_by_rank_0"]
    assert set(map(int, counts)) == set(message_counts.COUNTED)
    for n_ranks, sizes in counts.items():
        assert set(map(int, sizes)) == set(message_counts.SIZES)
        for n_bytes, sent in sizes.items():
            assert tuple(sent) == message_counts.engine(int(n_bytes), int(n_ranks))


@pytest.mark.parametrize("n_bytes", [4096, 65536])
@pytest.mark.parametrize("n_ranks", [16, 64, 1024])
def test_small_vectors_of_many_ranks_take_few_messages(n_ranks, n_bytes):
    """log2(ranks) to gather, and to alltoall 3 for each of half as many rounds."""
    sent = message_counts.engine(n_bytes, n_ranks)
    direct = message_counts.direct(n_bytes, n_ranks)
    assert sent[0] == 5 * message_counts.rounds(n_ranks) // 2
    assert message_counts.simulated_s(sent) < message_counts.simulated_s(direct)


def test_the_simulator_says_what_the_thesis_prints():
    for name, printed, simulated, _ in study.named_rows():
        assert float(simulated) == pytest.approx(float(printed), rel=0.16), name
    assert [row[1] == row[2] for row in study.sweep_rows()] == [True, True]  # the best K and f


def test_auto_is_a_fifth_faster_and_within_its_bound():
    for row in study.auto_rows():
        own_ms, times, bound_ms = (float(row[i]) for i in (2, 3, 4))
        assert times >= 1.2 and own_ms >= bound_ms


def test_the_committed_page_is_up_to_date():
    """Write it again with `make thesis-scaling`."""
    assert (DOCS / "thesis-scaling.md").read_text() == study.page()
