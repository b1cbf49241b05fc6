"""Runs that take no time, for every test of this folder."""

from tests.bench.fakes import fake_runs  # noqa: F401
