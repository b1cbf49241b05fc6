"""The cases of compression_cases.py, with one and with several ranks per host."""

import ast
from pathlib import Path

import pytest

from tests.helpers.spawn import spawn

SOURCE = Path(__file__).with_name("compression_cases.py")
CASES = [
    f"tests.parallel.compression_cases:{node.name}"
    for node in ast.parse(SOURCE.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.mark.parametrize(("size", "per_host"), [(1, 1), (3, 1), (4, 2), (3, 2)])
def test_every_case(size, per_host):
    results = spawn(size, CASES, env={"TFSCALE_RANKS_PER_HOST": str(per_host)})
    bad = [r for r in results if r.status != "ok"]
    assert not bad, "\n".join(f"{r.case}, rank {r.rank}: {r.status}\n{r.text}" for r in bad)


def test_runs_that_continue_lose_nothing(tmp_path):
    """With the same ranks they end with the same bits, with others with the same sum."""
    stages = [(4, 1, "begin_runs"), (4, 1, "continue_runs")]
    stages += [(4, 2, "continue_runs_with_fewer_ranks"), (3, 1, "continue_runs_with_fewer_ranks")]
    for size, per_host, case in [*stages, (1, 1, "end_runs_on_one_rank")]:
        env = {"RUNS_FOLDER": str(tmp_path), "TFSCALE_RANKS_PER_HOST": str(per_host)}
        results = spawn(size, [f"tests.parallel.compression_cases:{case}"], 120, env)
        bad = [r for r in results if r.status != "ok"]
        assert not bad, "\n".join(f"{case}, rank {r.rank}: {r.status}\n{r.text}" for r in bad)
