"""Every `case_*` of `cases_*.py` here, one mpiexec per number of ranks.

Those of `WITH_ALL_SIZES` run with every number that they allow, others alone, if they may, and with
one number above 1, by turns: tracing a model once more costs seconds. `make test-ranks` (RANKS=all)
leaves nothing out. `make test` (RANKS=quick) runs equality with one process, and the cases of
Horovod's contract, on 2 ranks.

Cases are found in the source text: their modules are imported by the ranks only.
"""

from collections import Counter

import pytest

from tests.helpers.cases import EXTENT, HAS_ALL_SIZES, find_cases
from tests.horovod_contract.intents import INTENTS
from tfscale.testing import RankResult, spawn

# Equality with one process: what all else rests on.
WITH_ALL_SIZES = {
    "tests.parallel.cases_adaptive:case_growing_batches_equal_one_process",
    "tests.parallel.cases_chunked:case_chunks_equal_one_process",
    "tests.parallel.cases_equality:case_every_model",
    "tests.parallel.cases_equality:case_every_optimizer",
    "tests.parallel.cases_equality:case_plain_batch_normalization_is_ghost_batches",
    "tests.parallel.cases_equality:case_sync_batch_normalization",
    "tests.parallel.cases_growing_datasets:case_batches_of_a_dataset_grow_from_the_next_epoch_on",
    "tests.parallel.cases_sharded:case_every_model",
}


def by_turns(cases: list[tuple[str, int, float | None]]) -> list[tuple[str, int, float | None]]:
    """Return each case with one of its sizes above 1, cases of the same sizes taking turns."""
    allowed: dict[str, list[int]] = {}
    for case, size, _ in cases:
        if size > 1:
            allowed.setdefault(case, []).append(size)
    n_before: Counter[tuple[int, ...]] = Counter()
    chosen = {}
    for case, several in allowed.items():
        kind = tuple(several)
        chosen[case] = kind if case in WITH_ALL_SIZES else (kind[n_before[kind] % len(kind)],)
        n_before[kind] += 1
    return [item for item in cases if item[1] in (1, *chosen.get(item[0], ()))]


def choose_cases() -> list[tuple[str, int, float | None]]:
    if HAS_ALL_SIZES:
        return find_cases()
    if EXTENT == "quick":
        contract = {f"tests.parallel.cases_{n}" for names in INTENTS.values() for n in names}
        return [c for c in find_cases() if c[1] == 2 and c[0] in contract | WITH_ALL_SIZES]
    return by_turns(find_cases())


CASES = choose_cases()
IDS = [f"{size}-{case.rpartition('.cases_')[2]}" for case, size, _ in CASES]


@pytest.fixture(scope="session")
def outcomes(request) -> dict[tuple[str, int], list[RankResult]]:
    """Results of all selected cases, filled once per size when the first is asked for."""
    return {}


def test_no_case_is_left_out():
    known = {case for case, _, _ in find_cases()}
    assert known == {case for case, _, _ in by_turns(find_cases())} and known > WITH_ALL_SIZES


def run_size(session: pytest.Session, size: int) -> dict[tuple[str, int], list[RankResult]]:
    selected = [
        i.callspec.params["case"] for i in session.items if "case" in getattr(i, "fixturenames", ())
    ]
    chosen = [item for item in selected if item[1] == size]
    limits = {case: limit_s or 180.0 for case, _, limit_s in chosen}
    results: dict[tuple[str, int], list[RankResult]] = {}
    for result in spawn(size, [case for case, _, _ in chosen], timeout_s=limits):
        results.setdefault((result.case, size), []).append(result)
    return results


@pytest.mark.quick
@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_case(case, outcomes, request):
    name, size, _ = case
    if (name, size) not in outcomes:
        outcomes.update(run_size(request.session, size))
    results = outcomes[name, size]
    bad = [r for r in results if r.status not in ("ok", "skipped")]
    if bad:
        text = "\n".join(f"--- rank {r.rank} of {size}: {r.status}\n{r.text}" for r in bad)
        pytest.fail(text, pytrace=False)
    if all(r.status == "skipped" for r in results):
        pytest.skip(results[0].text)
