"""`python -m benchmarks` and `make bench`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.cells import Choice, cells_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def called(monkeypatch):
    """Paths that would have been written."""
    paths = []

    def measure(cells, n_rounds, path, timeout_s, tell):
        paths.append(path)
        return {"runs": []}

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "leave_on_sigterm", lambda: None)
    return paths


def _call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    return command.main()


def test_each_extent_has_a_file_of_its_own(called, monkeypatch, tmp_path):
    for words in ([], ["--quick"], ["--full"], ["--output", str(tmp_path / "mine.json")]):
        assert _call(monkeypatch, "step", *words) == 0
    assert [path.name for path in called] == ["table.json", "quick.json", "full.json", "mine.json"]
    assert len({path.parent for path in called[:3]}) == 1


def test_unknown_systems_are_refused_at_once(called, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        _call(monkeypatch, "step", "--systems", "compute", "tfscale-fastest")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "Received: tfscale-fastest." in told
    assert "compute, tfscale-allreduce, tfscale-chunked" in told
    assert not called


def test_systems_may_be_of_any_suite_and_of_other_exchanges():
    choice = Choice(systems=["compute", "mpi"], places=["1gbit"], models=["vgg_a"])
    assert {cell.system for cell in cells_of(["step", "fc1"], choice)} >= {"compute", "mpi"}
    with pytest.raises(ValueError, match="tfscale-sharded"):
        cells_of(["step"], Choice(systems=["tfscale-sharded"], places=["memory"]))
    choice = Choice(systems=["tfscale-sharded"], places=["memory"], exchanges=["sharded"])
    assert {cell.system for cell in cells_of(["step"], choice)} == {"tfscale-sharded"}


FAKE_PYTHON = """#!/bin/sh
case "$2" in
  benchmarks) {measured}; exit {status} ;;
  benchmarks.report) mkdir -p "$5" && echo the page > "$5/benchmarks.md" ;;
esac
"""


@pytest.mark.parametrize(
    ("status", "has_results"), [(0, True), (1, True), (3, False)], ids=["well", "failed", "refused"]
)
def test_make_bench_reports_whatever_failed(tmp_path, status, has_results):
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    measured = f"touch {tmp_path}/bench/quick.json" if has_results else ":"
    (tmp_path / "bench").mkdir()
    fake.write_text(FAKE_PYTHON.format(measured=measured, status=status))
    fake.chmod(0o755)
    # `build` counts as done: nothing is compiled.
    words = ["make", "-o", "build", "bench-quick", f"BIN={fake.parent}", f"BENCH={tmp_path}/bench"]
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C"}  # without what a make above has set
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ("the page" in done.stdout) is has_results
    assert (done.returncode == 0) is (status == 0)
    assert status == 0 or f"Error {status}" in done.stderr
