"""The cases of compression_cases.py, with one and with several ranks per host."""

import pytest

from tests.helpers.cases import cases_of
from tfscale.testing import require_ok, spawn

CASES = cases_of("tests.parallel.compression_cases")


@pytest.mark.parametrize(("size", "per_host"), [(1, 1), (3, 1), (4, 2), (3, 2)])
def test_every_case(size, per_host):
    require_ok(spawn(size, CASES, env={"TFSCALE_RANKS_PER_HOST": str(per_host)}))


def test_runs_that_continue_lose_nothing(tmp_path):
    """With the same ranks they end with the same bits, with others with the same sum."""
    stages = [(4, 1, "begin_runs"), (4, 1, "continue_runs")]
    others = [
        (size, n, "continue_runs_with_other_ranks") for size, n in ((4, 2), (2, 1), (3, 1), (1, 1))
    ]
    for size, per_host, case in (*stages, *others):
        env = {"RUNS_FOLDER": str(tmp_path), "TFSCALE_RANKS_PER_HOST": str(per_host)}
        require_ok(spawn(size, [f"tests.parallel.compression_cases:{case}"], 120, env))
