"""Machine and commit that made a result, as they are noted beside it."""

import argparse
import json
import os
import subprocess
from pathlib import Path

import pytest

from tfscale import tune
from tfscale.measure import batch_size, groups, provenance


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


def test_sources_that_git_does_not_know_are_changes(tmp_path):
    for name in ("custom_ops/comm.cc", "recipes/mine.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    before = provenance._commit(tmp_path)
    assert before and not before.endswith("+")
    sources = ("tfscale/a.py", "recipes/a.py", "recipes/studies/a.py", "benchmarks/a.py")
    results = ("recipes/results/a.json", "notes.py")
    for path in (*sources, "custom_ops/a.cc", *results):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("new\n")
        mark = "" if path in results else "+"
        assert provenance._commit(tmp_path) == before + mark, path
        (tmp_path / path).unlink()
    (tmp_path / "recipes" / "mine.py").write_text("changed\n")
    assert provenance._commit(tmp_path) == f"{before}+"


def test_tuners_tell_what_makes_a_recommendation():
    for arguments, seed in (
        (["--seed", "3", "--epochs", "2"], {"seed": "3"}),
        (["--epochs", "2", "--seed=7"], {"seed": "7"}),
        (["--seeds", "4"], {}),
    ):
        given = argparse.Namespace(script="train.py", arguments=arguments, groups="2,4", steps=None)
        made = tune._made("groups", given, ("groups", "steps"))
        command = " ".join(["tfscale tune groups --groups=2,4 train.py", *arguments])
        assert made.keys() == provenance.describe().keys() | {"command"} | seed.keys()
        assert made.items() >= {"command": command, **seed}.items()


def _groups(folder, *made):
    groups.write_report([groups.GroupProbe(2, 8, 0.1, (1.0, 1.0), (1.0,) * 16)], folder, *made)


def _batch_size(folder, *made):
    sizes = tuple(batch_size.SizeMeasures(n, 4, 1.0, 1.0, 0.5, 1.0) for n in (1, 2))
    batch_size.write_report([batch_size.Stage(0, 1.0, 2.0, sizes)], folder, *made)


@pytest.mark.parametrize("report", [_groups, _batch_size])
def test_recommendations_are_written_with_what_made_them(report, tmp_path):
    report(tmp_path, {"command": "mine", "seed": "3"})
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["made"] == {"command": "mine", "seed": "3"}
    report(tmp_path)
    assert set(json.loads(path.read_text())["made"]) == set(provenance.describe())
