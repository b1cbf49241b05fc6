"""Collectives where there is no MPI: what `auto` takes under `horovodrun --gloo`."""

import os
import subprocess
import sys

import pytest

from tests.helpers.environment import QUIET
from tests.horovod_contract.test_launchers import HOROVODRUN, ROOT

SCRIPT = "tests.horovod_contract.collective_cases"


@pytest.mark.skipif(HOROVODRUN is None, reason="Horovod is not installed: make horovod")
@pytest.mark.timeout(300)
def test_collectives_over_gloo():
    command = [str(HOROVODRUN), "--gloo", "-np", "3", sys.executable, "-m", SCRIPT]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    assert done.stdout.count("backend horovod .") == 3
    assert all(f"rank {rank} has run" in done.stdout for rank in range(3))
