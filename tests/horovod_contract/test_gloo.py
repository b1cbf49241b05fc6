"""Collectives where there is no MPI: what `auto` takes under `horovodrun --gloo`.

The ranks run this file too: every case of tests/parallel/cases_collectives_*.py.
"""

import importlib
import os
import subprocess
import sys

import pytest

import tfscale
from tests.helpers.environment import QUIET
from tests.helpers.worker import forget_process_sets
from tests.horovod_contract.test_launchers import HOROVODRUN, ROOT
from tests.parallel.test_parallel import find_cases
from tfscale.comm import runtime


@pytest.mark.skipif(HOROVODRUN is None, reason="Horovod is not installed: make horovod")
@pytest.mark.timeout(300)
def test_collectives_over_gloo():
    command = [str(HOROVODRUN), "--gloo", "-np", "3", sys.executable, "-m", __name__]
    environ = {**os.environ, **QUIET}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environ
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    assert done.stdout.count("backend horovod .") == 3
    assert all(f"rank {rank} has run" in done.stdout for rank in range(3))


def main() -> None:
    """Run those that Horovod can pass; print their number."""
    tfscale.init()
    print(f"backend {runtime.backend().name} .", flush=True)
    cases = [
        case for case, size, _ in find_cases() if "collectives_" in case and size == tfscale.size()
    ]
    for case in cases:
        module, _, name = case.partition(":")
        function = getattr(importlib.import_module(module), name)
        if not hasattr(function, "engine_only"):
            function()
            tfscale.barrier()
            forget_process_sets()
    print(f"rank {tfscale.rank()} has run {len(cases)} cases .", flush=True)


if __name__ == "__main__":
    main()
