"""`tfscale doctor` on a machine that has everything."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.environment import QUIET


@pytest.mark.timeout(240)
def test_a_healthy_machine():
    done = subprocess.run(
        [sys.executable, "-m", "tfscale.launcher.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["ok"] is True
    assert {"tensorflow", "keras", "mpi", "library", "threads", "gpus"} <= set(checks)
    for name in ("tensorflow", "keras", "mpi", "library"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["self test"]["status"] == "ok"
    assert checks["self test"]["detail"] == "2 ranks: allreduce is right"
