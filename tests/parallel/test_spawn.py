"""The tool that runs the other tests here: failures and hangs are told apart and survived."""

import os
import unittest

import pytest

import tfscale
from tfscale.testing import spawn


def fails_on_one_rank():
    if tfscale.rank() == 1:
        raise ValueError("this rank does not come")
    tfscale.barrier()


def works():
    tfscale.barrier()
    return [tfscale.rank(), tfscale.size()]


def is_skipped():
    raise unittest.SkipTest("not here")


def ends():
    os._exit(3)


@pytest.mark.timeout(300)
def test_a_failure_shows_who_hangs_and_the_rest_still_runs():
    cases = [fails_on_one_rank, f"{__name__}:works", is_skipped, ends]
    results = spawn(2, cases, timeout_s=60)
    names = [f"{__name__}:{n}" for n in ("fails_on_one_rank", "works", "is_skipped", "ends")]
    assert [(r.case, r.rank) for r in results] == [
        (name, rank) for name in names for rank in (0, 1)
    ]
    statuses = [r.status for r in results]
    assert statuses == ["hang", "failed", "ok", "ok", "skipped", "skipped", "lost", "lost"]
    assert [r.value for r in results[2:4]] == [[0, 2], [1, 2]]
    assert "in fails_on_one_rank" in results[0].text
    assert "ValueError: this rank does not come" in results[1].text
