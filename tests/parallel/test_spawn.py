"""The tool that runs the other tests here: failures and hangs are told apart and survived."""

import pytest

import tfscale
from tests.helpers.spawn import spawn


def fails_on_one_rank():
    if tfscale.rank() == 1:
        raise ValueError("this rank does not come")
    tfscale.barrier()


def works():
    tfscale.barrier()


@pytest.mark.timeout(300)
def test_a_failure_shows_who_hangs_and_the_rest_still_runs():
    bad, good = (f"{__name__}:{case}" for case in ("fails_on_one_rank", "works"))
    results = spawn(2, [bad, good], timeout_s=60)
    assert [(r.case, r.rank) for r in results] == [(bad, 0), (bad, 1), (good, 0), (good, 1)]
    assert [r.status for r in results] == ["hang", "failed", "ok", "ok"]
    assert "in fails_on_one_rank" in results[0].text
    assert "ValueError: this rank does not come" in results[1].text
