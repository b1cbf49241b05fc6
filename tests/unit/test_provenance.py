"""What is told of the machine and the commit that made a result."""

import os
from pathlib import Path

from tfscale.measure import provenance


def test_the_machine_is_told_without_names_of_hosts_or_folders():
    told = provenance.describe()
    assert set(told) == {"commit", "machine", "load", "versions"}
    assert "cores" in told["machine"] and "GiB" in told["machine"]
    assert "tensorflow 2." in told["versions"]
    text = " ".join(told.values())
    assert os.uname().nodename not in text and str(Path.home()) not in text


def test_without_git_there_is_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.describe()["commit"] == "no checkout"
