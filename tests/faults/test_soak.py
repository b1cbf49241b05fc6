"""Trainings that are disturbed, or asked to make room, and resume: what `make soak` does."""

import json
import os
import re
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
RUN = ["tfscale.launcher.cli", "run", "-np", "2", "--restarts", "3", "--", sys.executable]


def start(*words):
    """Start a module in a group of processes of its own; its output is in one pipe."""
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        env={**os.environ, **QUIET, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process):
    """End a process and the trainings that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.timeout(600)
def test_a_disturbed_training_ends_as_an_undisturbed_one():
    """Sharded and rounded, so that a checkpoint has parts that only one rank knows."""
    options = ["--minutes", "1.2", "--every", "5", "15", "--seed", "3"]
    process = start("tools.soak", *options, "--exchange", "sharded-int8")
    try:
        text, _ = process.communicate(timeout=580)
    finally:
        end(process)
    assert process.returncode == 0, text[-6000:]
    summary = json.loads(text.splitlines()[-1])
    assert summary["is_equal"] and summary["seed"] == 3
    assert summary["kills"] + summary["pauses"] > 0


@pytest.mark.timeout(3 * START_S)
def test_preempted_and_started_again(tmp_path):
    """A run that is asked to make room saves, says so by its exit code, and is started again."""
    process = start(*RUN, TRAINING, tmp_path, 1000, "allreduce")
    try:
        deadline = time.monotonic() + START_S
        while not list(tmp_path.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=START_S)
        assert process.returncode == 75, text
        (saved,) = re.findall(
            r"tfscale: saved step (\d+) in (\S+), and stopped, as requested", text
        )
        assert "restart 1" not in text
        newest = list_checkpoints(tmp_path / "checkpoints")[0]
        assert newest.is_finished and newest.step > 0
        assert saved == (str(newest.step), str(tmp_path / "checkpoints"))
        (tmp_path / "hurry").touch()
        n_epochs = newest.step // STEPS_PER_EPOCH
        process = start(*RUN, TRAINING, tmp_path, (n_epochs + 2) * STEPS_PER_EPOCH, "allreduce")
        text, _ = process.communicate(timeout=START_S)
        assert process.returncode == 0, text
        assert f"Resuming from step {newest.step}, epoch {n_epochs + 1}." in text
        assert (tmp_path / "final.npz").exists()
    finally:
        end(process)
