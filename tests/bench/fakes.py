"""Cells of one group, runs of them that nothing measured, and runs that take no time."""

import contextlib

import pytest

from benchmarks import harness, provenance
from benchmarks.harness import Cell

SECONDS = {"compute": 0.1, "horovod": 2.0, "tfscale-allreduce": 1.0}


def cell(system, place="1gbit"):
    return Cell("step", "vgg 1gbit", system, place, 4, ("--model", "vgg"))


CELLS = [cell("compute", "memory"), cell("tfscale-allreduce"), cell("horovod")]


def run(system, number, seconds, session="s", commit="abc"):
    """A run as a file has it, of three equal steps."""
    where = {"suite": "step", "group": "vgg 1gbit", "place": "1gbit", "n_ranks": 4}
    origin = {"session": session, "commit": commit, "arguments": ["--model", "vgg"]}
    found = {"samples": {"vgg": [seconds] * 3}, "load": [1.0, 2.0]}
    return {**where, **origin, "system": system, "round": number, **found}


class FakeRuns(list):
    """The systems that ran, in order; `commit` is that of the checkout, `act` comes before each."""

    commit, act = "abc", staticmethod(lambda: None)

    def run_cell(self, cell, timeout_s, variables=None):
        self.act()
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
