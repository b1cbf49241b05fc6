"""A short soak: what `make soak` does for half an hour."""

import json
import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_a_disturbed_training_ends_as_an_undisturbed_one():
    """Sharded and rounded, so that a checkpoint has parts that only one rank knows."""
    options = ["--minutes", "1.2", "--every", "5", "15", "--seed", "3"]
    options += ["--exchange", "sharded-int8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.soak", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=580)
    finally:  # the trainings that it started, too
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, text[-6000:]
    summary = json.loads(text.splitlines()[-1])
    assert summary["is_equal"] and summary["seed"] == 3
    assert summary["kills"] + summary["pauses"] > 0
