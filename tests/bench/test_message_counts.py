"""The formulas of messages are those that the engine was counted to send."""

import json
from pathlib import Path

import pytest

from benchmarks import message_counts

COUNTED = json.loads((Path(__file__).parents[2] / "docs" / "message-counts.json").read_text())


def test_formulas_equal_the_counts_of_the_engine():
    counts = COUNTED["sent_by_rank_0"]
    assert set(map(int, counts)) == set(message_counts.COUNTED)
    for n_ranks, sizes in counts.items():
        assert set(map(int, sizes)) == set(message_counts.SIZES)
        for n_bytes, sent in sizes.items():
            assert tuple(sent) == message_counts.engine(int(n_bytes), int(n_ranks))


@pytest.mark.parametrize("n_ranks", [16, 64, 1024])
def test_small_vectors_of_many_ranks_take_log2_of_ranks_messages(n_ranks):
    assert message_counts.engine(4096, n_ranks)[0] == message_counts.rounds(n_ranks)
