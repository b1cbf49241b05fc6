"""Every intent on the Horovod backend; one mpiexec per number of ranks.

Cases run with 2 ranks, or with 3 where they need them; with both in `make test-ranks`.
"""

import importlib.util

import pytest

from tests.helpers.cases import HAS_ALL_SIZES, find_cases
from tests.horovod_contract.intents import INTENTS
from tfscale.testing import spawn

# A missing rank is an error after seconds, not minutes.
ENVIRONMENT = {"TFSCALE_BACKEND": "horovod", "TFSCALE_STALL_SHUTDOWN_S": "30"}
NAMES = {name: f"tests.parallel.cases_{name}" for names in INTENTS.values() for name in names}
# Limit in seconds of each (case, size) that exists.
LIMITS = {
    (case, size): limit_s or 60.0
    for case, size, limit_s in find_cases()
    if size in (2, 3) and case in NAMES.values()
}


def test_every_intent_has_its_cases_on_both_backends():
    """tests/parallel runs them on the engine; a renamed case must not vanish here."""
    assert {case for case, _ in LIMITS} == set(NAMES.values())


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("size", [2, 3])
def test_cases_pass_on_horovod(size):
    others = {case for case, n_ranks in LIMITS if n_ranks < size and not HAS_ALL_SIZES}
    limits = {case: s for (case, n), s in LIMITS.items() if n == size and case not in others}
    bad = [
        f"--- {result.case}, rank {result.rank} of {size}: {result.status}\n{result.text}"
        for result in spawn(size, list(limits), timeout_s=limits, env=ENVIRONMENT)
        if result.status not in ("ok", "skipped")
    ]
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)
