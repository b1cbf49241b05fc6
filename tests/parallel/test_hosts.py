"""The cases of host_cases.py on layouts of hosts, equal and uneven; groups of hosts."""

import pytest

from tests.helpers.cases import cases_of
from tfscale.testing import require_ok, spawn

CASES = cases_of("tests.parallel.host_cases")
LAYOUTS = {"1x4": (4, 4), "2x2": (4, 2), "4x1": (4, 1), "2+1": (3, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_case(layout):
    size, per_host = LAYOUTS[layout]
    of_layout = ["tests.parallel.cases_local_sgd:groups_of_hosts"] * (layout == "2x2")
    environ = {"TFSCALE_RANKS_PER_HOST": str(per_host)}
    require_ok(spawn(size, [*CASES, *of_layout], 120, environ))
