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


@pytest.mark.parametrize("n_bytes", [4096, 65536])
@pytest.mark.parametrize("n_ranks", [16, 64, 1024])
def test_small_vectors_of_many_ranks_take_few_messages(n_ranks, n_bytes):
    """log2(ranks) to gather, and to alltoall 3 for each of half as many rounds."""
    sent = message_counts.engine(n_bytes, n_ranks)
    assert sent[0] == 5 * message_counts.rounds(n_ranks) // 2
    assert message_counts.simulated_s(sent) < message_counts.simulated_s(
        message_counts.direct(n_bytes, n_ranks)
    )
