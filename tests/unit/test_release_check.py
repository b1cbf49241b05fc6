"""Measurements older than the engine are told, by suite and place."""

import json
import subprocess

from tools import release_check


def git(folder, *words):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_runs_before_the_last_change_of_the_engine_are_old(tmp_path, monkeypatch, capsys):
    git(tmp_path, "init", "-q")
    commits = []
    for number, name in enumerate(("custom_ops/comm/a.cc", "custom_ops/comm/a.cc", "README")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", name)
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
    before, change, after = commits
    assert release_check.last_change("custom_ops/comm", tmp_path) == change
    found = {
        c: release_check.has(c, change, tmp_path) for c in (*commits, f"{after}+1a2b", "0" * 40)
    }
    assert [c for c, is_new in found.items() if is_new] == [change, after]
    runs = [
        {"suite": "step", "place": "1gbit", "commit": commit}
        for commit in (before, after, f"{after}+1a2b")
    ]
    assert release_check.old_runs(runs, found) == [("step", "1gbit", 3, 2)]
    monkeypatch.setattr(release_check, "last_change", lambda folder: change)
    monkeypatch.setattr(release_check, "has", lambda commit, change: found[commit])
    path = tmp_path / "table.json"
    for kept, code in ((runs, 1), (runs[1:2], 0)):
        path.write_text(json.dumps({"sessions": {}, "runs": kept}))
        assert release_check.main([str(path)]) == code
    assert "2 of 3 are older" in capsys.readouterr().out
