"""Runs that take no time."""

import contextlib

import pytest

from benchmarks import harness, provenance

SECONDS = {"compute": 0.1, "horovod": 2.0, "tfscale-allreduce": 1.0}


class FakeRuns(list):
    """The systems that ran, in order; `commit` is that of the checkout."""

    commit = "abc"

    def run_cell(self, cell, timeout_s):
        self.append(cell.system)
        found = {"samples": {"vgg": [SECONDS[cell.system]] * 3}, "bytes": {}, "load": [1.0, 2.0]}
        numbers = {"peak_bytes": 2**30, "start_s": 5.0, "least_bytes": 1e6, "allreduce_bytes": 1e8}
        return {**found, **numbers, "commit": self.commit}


@pytest.fixture
def fake_runs(monkeypatch):
    ran = FakeRuns()
    monkeypatch.setattr(harness, "run_cell", ran.run_cell)
    monkeypatch.setattr(harness, "cluster_for", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(provenance, "commit", lambda: ran.commit)
    return ran
