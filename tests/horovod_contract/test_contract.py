"""Every intent on the Horovod backend; one mpiexec per number of ranks.

Cases run with 2 ranks, or with 3 where they need them; with both in `make test-ranks`.
"""

import importlib.util

import pytest

from tests.helpers.spawn import RankResult, spawn
from tests.horovod_contract.intents import INTENTS
from tests.parallel.test_parallel import HAS_ALL_SIZES, find_cases

SIZES = (2, 3)
# A missing rank is an error after seconds, not minutes.
ENVIRONMENT = {"TFSCALE_BACKEND": "horovod", "TFSCALE_STALL_SHUTDOWN_S": "30"}

# Limit in seconds of each (case, size) that exists.
LIMITS = {(case, size): limit_s or 60.0 for case, size, limit_s in find_cases()}


def sizes_of(name: str) -> list[int]:
    """Return the sizes that a case of an intent runs with: one of them in `make test`."""
    sizes = [size for size in SIZES if (f"tests.parallel.cases_{name}", size) in LIMITS]
    return sizes if HAS_ALL_SIZES else sizes[:1]


CASES = {
    (intent, size): [f"tests.parallel.cases_{name}" for name in names if size in sizes_of(name)]
    for size in SIZES
    for intent, names in INTENTS.items()
}


def test_every_intent_has_its_cases_on_both_backends():
    """tests/parallel runs them on the engine; a renamed case must not vanish here."""
    names = {name for names in INTENTS.values() for name in names}
    assert not [name for name in names if not sizes_of(name)]
    run = {case for cases in CASES.values() for case in cases}
    assert run == {f"tests.parallel.cases_{name}" for name in names}


@pytest.fixture(scope="session")
def outcomes() -> dict[tuple[str, int], list[RankResult]]:
    """Results of the selected cases, filled once per size when the first is asked for."""
    return {}


def run_size(session: pytest.Session, size: int) -> dict[tuple[str, int], list[RankResult]]:
    chosen = [
        case
        for item in session.items
        if "intent" in getattr(item, "fixturenames", ()) and item.callspec.params["size"] == size
        for case in CASES[item.callspec.params["intent"], size]
    ]
    limits = {case: LIMITS[case, size] for case in chosen}
    results: dict[tuple[str, int], list[RankResult]] = {}
    for result in spawn(size, chosen, timeout_s=limits, env=ENVIRONMENT):
        results.setdefault((result.case, size), []).append(result)
    return results


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("intent", "size"), [key for key, cases in CASES.items() if cases])
def test_intent(intent, size, outcomes, request):
    cases = CASES[intent, size]
    if any((case, size) not in outcomes for case in cases):
        outcomes.update(run_size(request.session, size))
    bad = [
        f"--- {result.case}, rank {result.rank} of {size}: {result.status}\n{result.text}"
        for case in cases
        for result in outcomes[case, size]
        if result.status not in ("ok", "skipped")
    ]
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)
