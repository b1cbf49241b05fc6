"""`python -m benchmarks` and `make bench`."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import cells
from benchmarks.cells import Choice, cells_of

ROOT = Path(__file__).parents[2]


def test_systems_may_be_of_any_suite_and_of_other_exchanges():
    choice = Choice(systems=["compute", "mpi"], places=["1gbit"], models=["vgg_a"])
    assert {cell.system for cell in cells_of(["step", "fc1"], choice)} >= {"compute", "mpi"}
    with pytest.raises(ValueError, match="tfscale-sharded"):
        cells_of(["step"], Choice(systems=["tfscale-sharded"], places=["memory"]))
    choice = Choice(systems=["tfscale-sharded"], places=["memory"], exchanges=["sharded"])
    assert {cell.system for cell in cells_of(["step"], choice)} == {"tfscale-sharded"}


def test_systems_of_pytorch_are_measured_where_they_are_asked_for(monkeypatch):
    choice = Choice(systems=["compute", "ddp"], places=["1gbit"], models=["resnet50"])
    monkeypatch.setattr(cells, "has_ddp", lambda: True)
    assert [cell.system for cell in cells_of(["step"], choice)] == ["compute", "ddp"]
    monkeypatch.setattr(cells, "has_ddp", lambda: False)
    with pytest.raises(ValueError, match="ddp"):
        cells_of(["step"], choice)


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
