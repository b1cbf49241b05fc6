"""What is told of the machine and the commit that made a result."""

import os
import subprocess
from pathlib import Path

import provenance
import pytest


def test_the_machine_is_told_without_names_of_hosts_or_folders():
    told = provenance.describe()
    assert set(told) == {"commit", "machine", "load", "versions"}
    assert "cores" in told["machine"] and "GiB" in told["machine"]
    assert "tensorflow 2." in told["versions"]
    text = " ".join(told.values())
    assert os.uname().nodename not in text and str(Path.home()) not in text


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one file in each room."""

    def git(*words):
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *names, *words], check=True, capture_output=True)

    for room in ("tfscale", "custom_ops", "recipes", "docs"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "file").touch()
    try:
        git("init")
    except FileNotFoundError:
        # Only this fixture needs git: sources from an archive are tested without it.
        pytest.skip("no git here to make a checkout with")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "recipes" / "provenance.py"))
    return tmp_path


def test_without_git_there_is_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.describe()["commit"] == "no checkout"
