"""Tools for tests of training, where they need no ranks; see tests/parallel/test_spawn.py."""

import subprocess
import sys

import numpy as np
import pytest

import tfscale
import tfscale.keras as hvd
from tfscale.testing import (
    FakeRanks,
    RankResult,
    pretend_rank,
    require_equal_ranks,
    require_ok,
    run_command,
)


@pytest.fixture(autouse=True)
def single_job():
    tfscale.init()
    yield
    tfscale.shutdown()


def test_it_is_imported_without_frameworks_and_not_by_tfscale():
    text = "import sys, tfscale; print('tfscale.testing' in sys.modules); import tfscale.testing\n"
    text += "print({'tensorflow', 'keras', 'pytest'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False", "set()"]


def test_fake_ranks_exchange_and_what_they_raise_is_returned():
    def body(rank):
        if rank == 2:
            raise ValueError("no rank 2")
        return tfscale.rank(), tfscale.size(), tfscale.allgather_object(rank)

    ranks = FakeRanks(2)
    assert ranks.run(body) == [(0, 2, [0, 1]), (1, 2, [0, 1])]
    found = FakeRanks(3).run(body)
    assert [type(each) for each in found] == [TimeoutError, TimeoutError, ValueError]
    assert ranks.run(lambda rank: float(tfscale.allreduce(float(rank)))) == [0.5, 0.5]
    assert tfscale.allgather_object(7) == [7] and tfscale.size() == 1  # as before
    with pretend_rank(1, 4):
        assert (tfscale.rank(), tfscale.size(), tfscale.local_size()) == (1, 4, 1)
        assert (hvd.rank(), hvd.size()) == (1, 4)


def test_fake_ranks_reduce_as_ranks_do():
    def reduced(**options):
        (first, second) = FakeRanks(2).run(lambda r: float(hvd.allreduce(2.0 + r, **options)))
        assert first == second
        return first

    assert reduced() == 2.5 and reduced(op=hvd.Sum) == reduced(average=False) == 5.0
    assert reduced(op=tfscale.Product) == 6.0
    assert reduced(op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5) == 5.0
    assert FakeRanks(2).run(lambda r: tfscale.allgather_object(r, "ranks")) == [[0, 1]] * 2
    count = FakeRanks(2).run(lambda r: tfscale.allreduce(np.int64(r), op=tfscale.Sum))
    assert [value.dtype for value in count] == [np.int64] * 2


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (1.0, 1.0 + 2**-52, "of rank 1 differs from that of rank 0"),
        (0.0, -0.0, "sign of a zero"),
        (np.float32(1), np.float64(1), "float64"),
    ],
)
def test_ranks_are_equal_bit_for_bit_or_all_of_them_fail(first, second, text):
    values = [np.array([2.0, first], type(first)), np.array([2.0, second], type(second))]
    for found in FakeRanks(2).run(lambda rank: require_equal_ranks([values[rank]])):
        assert isinstance(found, AssertionError) and text in str(found)
    assert FakeRanks(2).run(lambda rank: require_equal_ranks([values[0]])) == [None, None]


def test_require_ok_shows_each_rank_that_failed():
    with pytest.raises(AssertionError, match="m:f, rank 1: failed\nwhy") as error:
        require_ok([RankResult("m:f", 0, "ok", "fine"), RankResult("m:f", 1, "failed", "why")])
    assert "fine" not in str(error.value)


def test_commands_end_in_time_with_what_they_wrote():
    words = [sys.executable, "-c", "import os; os.write(1, b'out'); os.write(2, b'err'); exit(3)"]
    together, apart = run_command(words, 60), run_command(words, 60, errors_apart=True)
    assert (together.exit_code, together.output, together.errors) == (3, "outerr", "")
    assert (apart.exit_code, apart.output, apart.errors) == (3, "out", "err")
    assert run_command(["sleep", "60"], timeout_s=0.1).exit_code is None
