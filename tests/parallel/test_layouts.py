"""Horovod's contract, and the death of a rank, on layouts of hosts, equal and uneven.

With RANKS=all (`make test-ranks`) every case of the contract that may have as many ranks, and a
death under every exchange, is on every layout; otherwise they take turns.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.faults import test_matrix
from tests.helpers.cases import HAS_ALL_SIZES, find_cases
from tests.helpers.launching import start_job
from tests.horovod_contract.intents import INTENTS
from tests.parallel.test_hosts import LAYOUTS
from tfscale.testing import spawn

CONTRACT = {f"tests.parallel.cases_{name}" for names in INTENTS.values() for name in names}
# Two groups that train apart have equally many ranks.
DEATHS = [(a, e) for a in LAYOUTS for e in test_matrix.EXCHANGES if (a, e) != ("2+1", "local")]


def environ(layout):
    return {"TFSCALE_RANKS_PER_HOST": str(LAYOUTS[layout][1])}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_contract(layout):
    size, _ = LAYOUTS[layout]
    limits = {c: s or 60.0 for c, n, s in find_cases() if c in CONTRACT and n == size}
    turn = slice(None) if HAS_ALL_SIZES else slice(list(LAYOUTS).index(layout), None, len(LAYOUTS))
    results = spawn(size, list(limits)[turn], limits, environ(layout))
    bad = [r for r in results if r.status not in ("ok", "skipped")]
    assert not bad, "\n".join(f"{r.case}, rank {r.rank}: {r.status}\n{r.text}" for r in bad)


@pytest.mark.timeout(test_matrix.DEADLINE_S + 30)
@pytest.mark.parametrize(("layout", "exchange"), DEATHS if HAS_ALL_SIZES else DEATHS[::5])
def test_killed_rank(layout, exchange, tmp_path):
    size, _ = LAYOUTS[layout]
    script = Path(test_matrix.__file__).with_name("job.py")
    command = [sys.executable, str(script), exchange, "SIGKILL"]
    variables = {**test_matrix.LIMITS, **environ(layout)}
    started = start_job(["-np", str(size)], command, variables, tmp_path / "output")
    try:
        code = started.process.wait(test_matrix.DEADLINE_S)
        output = started.output_tail(100_000)
    finally:
        started.end()
    assert code != 0, output
    (pattern,) = test_matrix.ENDS["SIGKILL"]
    assert re.search(pattern.replace("rank 1", f"rank (1|{size - 1})"), output), output
    assert "weights of rank" not in output, output
