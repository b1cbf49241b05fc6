"""The simulator of the engine: one seed is one run, and the engine in it is the library's."""

import subprocess

import pytest
import simulate_engine


@pytest.fixture(scope="module")
def program():
    """The simulator; compiling it takes a minute where nothing is built yet."""
    return simulate_engine.build()


def log_of(program, seed):
    command = [str(program), "--seed", str(seed), "--ranks", "16", "--log", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, lines[-3:]
    return lines[:-1]  # the last one has the time that it took


def test_one_seed_is_one_run_byte_for_byte(program):
    first, again, other = log_of(program, 1), log_of(program, 1), log_of(program, 2)
    assert len(first) > 1000  # sends, ends of collectives, prints of the engine
    assert first == again
    assert first != other


def test_a_run_does_not_depend_on_those_before_it(program):
    alone = simulate_engine.run_batch(program, 10, 1, [])
    after_others = simulate_engine.run_batch(program, 2, 9, [])
    up_to_it = simulate_engine.run_batch(program, 2, 8, [])
    assert not alone.problems
    assert not after_others.problems
    assert after_others.n_collectives - up_to_it.n_collectives == alone.n_collectives > 0


def test_a_crash_is_a_violation_of_its_seed(tmp_path):
    program = tmp_path / "crashes"
    program.write_text("#!/bin/sh\nprintf '41\\r42\\r' >&2\nkill -SEGV $$\n")
    program.chmod(0o755)
    tally = simulate_engine.run_batch(program, 41, 5, [])
    assert tally.problems == ["VIOLATION seed 42: the engine ended by signal 11"]


def test_the_engine_in_it_is_the_librarys(program):
    symbols = subprocess.run(["nm", "-C", str(program)], capture_output=True, text=True).stdout
    for name in ("Scheduler::Step()", "CommThread::Run()", "Reduction::Begin()", "Marks::Poll()"):
        assert f" T tfscale::{name}" in symbols
    assert " U MPI_" not in symbols


def test_seeds_are_those_of_the_commit(monkeypatch):
    """So a run of CI can be repeated anywhere."""
    commit = "0123456789" + "f" * 30 + "\n"
    monkeypatch.setattr(simulate_engine.subprocess, "check_output", lambda *_, **__: commit)
    assert simulate_engine.seed_of_commit() == 0x0123456789
    monkeypatch.setattr(simulate_engine.subprocess, "check_output", _without_git)
    assert simulate_engine.seed_of_commit() != simulate_engine.seed_of_commit()


def _without_git(*_, **__):
    raise FileNotFoundError("git")
