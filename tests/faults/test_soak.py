"""A short soak: what `make soak` does for half an hour."""

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest

from tools import soak


@pytest.mark.timeout(600)
def test_a_disturbed_training_ends_as_an_undisturbed_one():
    """Sharded, so that a checkpoint has parts that only one rank knows."""
    options = ["--minutes", "1.2", "--every", "5", "15", "--seed", "3", "--exchange", "sharded"]
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


@pytest.mark.parametrize(
    ("seconds", "text"), [(600, "did not end"), (0, "failed with exit code 3")]
)
def test_an_undisturbed_training_that_fails_or_hangs(tmp_path, monkeypatch, seconds, text):
    """An error says so, and nothing of it is left."""
    started = []

    def start(*_):
        code = f"import sys, time; time.sleep({seconds}); sys.exit(3)"
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return started[0]

    monkeypatch.setattr(soak, "start", start)
    monkeypatch.setattr(soak, "_REST_S", 0.5 if seconds else 60.0)
    with pytest.raises(SystemExit, match=f"The undisturbed training {text}"):
        soak.run_undisturbed(soak.Place(), argparse.Namespace(), tmp_path, 100)
    assert started[0].poll() is not None


def test_a_seed_is_chosen_and_told(tmp_path, monkeypatch, capsys):
    """With it the run can be repeated."""
    seen = []

    def disturbed(place, options, folder, n_steps):
        seen.append(options.seed)
        return soak.Disturbances(kills=1)

    monkeypatch.setattr(soak, "run_undisturbed", lambda *_: None)
    monkeypatch.setattr(soak, "run_disturbed", disturbed)
    monkeypatch.setattr(soak, "differences", lambda *_: [])
    for _ in range(2):
        assert soak.main(["--plain"]) == 0
        shown = capsys.readouterr().out
        assert f"--seed {seen[-1]}\n" in shown
        assert json.loads(shown.splitlines()[-1])["seed"] == seen[-1]
    assert seen[0] != seen[1]
