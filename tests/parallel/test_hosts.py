"""The cases of host_cases.py on layouts of hosts, equal and uneven."""

import pytest

from tests.helpers.spawn import cases_of, require_ok, spawn

CASES = cases_of("tests.parallel.host_cases")
LAYOUTS = {"1x4": (4, 4), "2x2": (4, 2), "4x1": (4, 1), "2+1": (3, 2)}


@pytest.mark.parametrize(("size", "per_host"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_case(size, per_host):
    require_ok(spawn(size, CASES, 120, {"TFSCALE_RANKS_PER_HOST": str(per_host)}))
