"""Every `case_*` of `cases_*.py` here, on 1, 2, 3 and 4 ranks; one mpiexec per number of ranks.

Cases are found in the source text: their modules are imported by the ranks only.
"""

import ast
from pathlib import Path

import pytest

from tests.helpers.spawn import RankResult, spawn

ALL_SIZES = (1, 2, 3, 4)
HERE = Path(__file__).parent


def read_mark(function: ast.FunctionDef) -> tuple[tuple[int, ...], float | None]:
    """Return the sizes and the time limit that `@sizes(...)` gives a case."""
    for mark in function.decorator_list:
        name = (
            getattr(mark.func, "id", getattr(mark.func, "attr", ""))
            if hasattr(mark, "func")
            else ""
        )
        if name == "sizes":
            allowed = tuple(ast.literal_eval(argument) for argument in mark.args)
            limits = {k.arg: ast.literal_eval(k.value) for k in mark.keywords}
            return allowed or ALL_SIZES, limits.get("timeout_s")
    return ALL_SIZES, None


def find_cases() -> list[tuple[str, int, float | None]]:
    """Return (case, size, limit in seconds or None), sizes ascending."""
    found = []
    for file in sorted(HERE.glob("cases_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("case_"):
                allowed, limit_s = read_mark(node)
                case = f"tests.parallel.{file.stem}:{node.name}"
                found += [(case, size, limit_s) for size in allowed]
    return sorted(found, key=lambda item: item[1])


CASES = find_cases()
IDS = [f"{size}-{case.rpartition('.cases_')[2]}" for case, size, _ in CASES]


@pytest.fixture(scope="session")
def outcomes(request) -> dict[tuple[str, int], list[RankResult]]:
    """Results of all selected cases, filled once per size when the first is asked for."""
    return {}


def run_size(session: pytest.Session, size: int) -> dict[tuple[str, int], list[RankResult]]:
    """Run the selected cases of one size."""
    selected = [
        i.callspec.params["case"] for i in session.items if "case" in getattr(i, "fixturenames", ())
    ]
    chosen = [item for item in selected if item[1] == size]
    limits = {case: limit_s or 60.0 for case, _, limit_s in chosen}
    results: dict[tuple[str, int], list[RankResult]] = {}
    for result in spawn(size, [case for case, _, _ in chosen], timeout_s=limits):
        results.setdefault((result.case, size), []).append(result)
    return results


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
