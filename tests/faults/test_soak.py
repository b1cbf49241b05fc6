"""A short soak: what `make soak` does for half an hour."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "tools" / "soak.py"


@pytest.mark.timeout(600)
def test_a_disturbed_training_ends_as_an_undisturbed_one():
    """Sharded, so that a checkpoint has parts that only one rank knows."""
    options = ["--minutes", "1.2", "--every", "5", "15", "--seed", "3", "--exchange", "sharded"]
    done = subprocess.run(
        [sys.executable, str(SOAK), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["is_equal"]
    assert summary["kills"] + summary["pauses"] > 0
