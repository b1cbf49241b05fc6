"""A run that is asked to make room saves, says so by its exit code, and can be started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.environment import QUIET
from tests.helpers.killed_job import START_S
from tfscale.checkpoints import list_checkpoints

STEPS_PER_EPOCH = 50  # of the training
TRAINING = Path(__file__).parents[2] / "tools" / "soak_training.py"
RUN = [sys.executable, "-m", "tfscale.launcher.cli", "run", "-np", "2", "--restarts", "3", "--"]


def start(folder, n_steps):
    command = [*RUN, sys.executable, str(TRAINING), str(folder), str(n_steps), "allreduce"]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        command,
        env={**os.environ, **QUIET, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.timeout(3 * START_S)
def test_preempted_and_started_again(tmp_path):
    process = start(tmp_path, 1000)
    try:
        deadline = time.monotonic() + START_S
        while not list(tmp_path.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=START_S)
        assert process.returncode == 75, text
        assert "Saved and stopped, as requested" in text
        assert "restart 1" not in text
        newest = list_checkpoints(tmp_path / "checkpoints")[0]
        assert newest.is_finished and newest.step > 0
        (tmp_path / "hurry").touch()
        n_epochs = newest.step // STEPS_PER_EPOCH
        process = start(tmp_path, (n_epochs + 2) * STEPS_PER_EPOCH)
        _, text = process.communicate(timeout=START_S)
        assert process.returncode == 0, text
        assert f"Resuming from step {newest.step}, epoch {n_epochs + 1}." in text
        assert (tmp_path / "final.npz").exists()
    finally:
        process.kill()
        process.wait()
