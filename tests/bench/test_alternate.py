"""Jobs that live side by side and take turns."""

import functools
import os
import subprocess
import sys

import pytest

from benchmarks import __main__ as main
from benchmarks import alternate, harness
from tests.bench.fakes import CELLS

CALL_S = 0.05  # a turn takes three times this
# Notes each call, and for how long its threads were stopped at most.
JOB = """
import sys, threading, time
from benchmarks import worker

name, log, fails = sys.argv[1:]
gaps = [0]

def watch():
    while True:
        start = time.monotonic()
        time.sleep(0.005)
        gaps.append(time.monotonic() - start)

def call():
    with open(log, "a") as file:
        file.write(name)
    time.sleep(0.05)  # the time that a step would take

threading.Thread(target=watch, daemon=True).start()

samples = worker.sample(call, warmup=1, repeats=2)
if fails:
    raise SystemExit(3)
print(len(samples.seconds), max(gaps))
"""


def run_job(log, name, variables, n_ranks=1, fails=""):
    command = [sys.executable, "-c", JOB, name, str(log), fails]
    environ = {**os.environ, **variables}
    ranks = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(n_ranks)
    ]
    outputs = [rank.communicate()[0].split() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        return {"error": "exit code 3"}
    numbers = [float(i) for i in range(int(outputs[0][0]))]
    stopped_s = min(float(words[1]) for words in outputs)
    return {"samples": {"vgg": numbers}, "explanation": "long", "stopped_s": stopped_s}


def test_jobs_take_turns_to_and_fro_and_others_are_stopped(tmp_path):
    log = tmp_path / "log"
    one = functools.partial(run_job, log, "a")
    two = functools.partial(run_job, log, "b", n_ranks=2)
    first, second = alternate.measure([one, two], [1, 2], 3, lambda line: None)
    assert log.read_text() == "aaa" + 2 * "bbb" + 2 * "bbb" + "aaa" + "aaa" + 2 * "bbb"
    assert [run["round"] for run in first] == [0, 1, 2]
    assert [run["samples"]["vgg"] for run in second] == [[0, 1], [2, 3], [4, 5]]
    assert min(first[0]["stopped_s"], second[0]["stopped_s"]) > 3 * CALL_S
    assert ["explanation" in run for run in first] == [True, False, False]


def test_a_job_that_fails_does_not_end_the_others(tmp_path):
    log = tmp_path / "log"
    one = functools.partial(run_job, log, "a", fails="yes")
    two = functools.partial(run_job, log, "b")
    failed, others = alternate.measure([one, two], [1, 1], 2, lambda line: None)
    assert failed == [{"error": "exit code 3", "round": 0}]
    assert len(others) == 2 and log.read_text().count("b") == 6


def test_an_interruption_ends_all_jobs(tmp_path):
    log = tmp_path / "log"
    jobs = [functools.partial(run_job, log, name) for name in "ab"]

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        alternate.measure(jobs, [1, 1], 2, interrupt)
    assert log.read_text() == "aaabbb"


def test_a_job_that_is_never_ready_ends_with_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(alternate.Job, "prepare", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        alternate.measure([functools.partial(run_job, tmp_path / "log", "a")], [1], 2, print)


def test_the_harness_keeps_a_run_per_turn(fake_runs, monkeypatch, tmp_path):
    def measure(run_cells, n_ranks, n_turns, tell):
        found = [run_cell({}) for run_cell in run_cells]
        return [[{**run, "round": turn} for turn in range(n_turns)] for run in found]

    monkeypatch.setattr(alternate, "measure", measure)
    told: list[str] = []
    how = (CELLS, 3, tmp_path / "results.json", 1.0, told.append, True)
    content = harness.measure(*how)
    turns = [(run["system"], run["round"]) for run in content["runs"]]
    assert turns == [(cell.system, turn) for cell in CELLS for turn in range(3)]
    assert len(told) == 10 and len(fake_runs) == 3
    harness.measure(*how)
    assert len(fake_runs) == 3  # all is done


def test_side_by_side_is_for_steps_outside_of_fit(monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(main, "leave_on_sigterm", lambda: None)
    monkeypatch.setattr(main, "measure", lambda cells, *_: measured.extend(cells) or {"runs": []})
    words = ["--places", "memory", "--models", "resnet20", "--side-by-side"]
    monkeypatch.setattr("sys.argv", ["benchmarks", "step", *words])
    assert main.main() == 0
    systems = {cell.system for cell in measured}
    assert "tfscale-auto" in systems and "tfscale-auto-fit" not in systems
    for suites in (["fit"], ["step", "fit"]):
        monkeypatch.setattr("sys.argv", ["benchmarks", *suites, *words])
        with pytest.raises(SystemExit):
            main.main()
        assert "side by side" in capsys.readouterr().err.lower()
