"""Jobs of several systems that live side by side, all but one of them stopped.

The speed of a machine that changes within seconds is the same for all that take turns of seconds.
Runs one after another each have a speed of their own, which no number of them averages out.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.worker import TURNS, Turns

_POLL_S = 0.01
Run = dict[str, Any]


class Job:
    """Processes of one cell, stopped as soon as they are ready, and again after each turn."""

    def __init__(self, turns: Turns, n_ranks: int, result: Future[Run]) -> None:
        self._turns = turns
        self._n_ranks = n_ranks
        self._result = result
        self._pids: list[int] = []

    def prepare(self) -> None:
        """Wait until all ranks are ready, and stop them."""
        self._wait(0)
        self._pids = self._turns.ready_for(0)
        self._signal(signal.SIGSTOP)

    def take(self, turn: int) -> None:
        """Continue the ranks for one turn."""
        self._signal(signal.SIGCONT)
        self._turns.beginning(turn).touch()
        self._wait(turn + 1)
        self._signal(signal.SIGSTOP)

    def finish(self) -> Run:
        """Continue the ranks until they end; return what they measured, as `harness.run_cell`."""
        self._signal(signal.SIGCONT)
        return self._result.result()

    def kill(self) -> None:
        """End ranks that have not ended."""
        self._signal(signal.SIGKILL)

    def _wait(self, turn: int) -> None:
        while len(self._turns.ready_for(turn)) < self._n_ranks:
            if self._result.done():
                return  # it has failed, and what it returned says how
            time.sleep(_POLL_S)

    def _signal(self, number: int) -> None:
        for pid in self._pids if not self._result.done() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def measure(
    run_cells: Sequence[Callable[[dict[str, str]], Run]],
    n_ranks: Sequence[int],
    n_turns: int,
    tell: Callable[[str], None],
) -> list[list[Run]]:
    """Run cells side by side, each in turn, to and fro.

    Args:
        run_cells: Of each cell what runs it with some environment variables in addition.
        n_ranks: Of each cell.
        n_turns: Of each cell.
        tell: Takes a line after each turn of all.

    Returns:
        Of each cell one run per turn; one with its "error" if it failed. Bytes of links, memory and
        the time until the first result are of the whole job.
    """
    context = multiprocessing.get_context("fork")  # jobs are in the cluster of this process
    with (
        ProcessPoolExecutor(len(run_cells), mp_context=context) as pool,
        # Removed before the pool waits for jobs: those that are not ready yet end by that.
        tempfile.TemporaryDirectory(prefix="tfscale-turns-", ignore_cleanup_errors=True) as folder,
    ):
        jobs: list[Job] = []
        try:
            for number, run_cell in enumerate(run_cells):
                turns = Turns(Path(folder) / str(number), n_turns)
                turns.folder.mkdir()
                result = pool.submit(run_cell, {TURNS: f"{turns.folder}:{n_turns}"})
                jobs.append(Job(turns, n_ranks[number], result))
                jobs[-1].prepare()
            for turn in range(n_turns):
                for job in jobs[:: -1 if turn % 2 else 1]:
                    job.take(turn)
                tell(f"turn {turn + 1} of {n_turns}")
            return [_by_turn(job.finish(), n_turns) for job in jobs]
        finally:
            for job in jobs:
                job.kill()


def _by_turn(run: Run, n_turns: int) -> list[Run]:
    """Return a run for each turn, with its share of the durations."""
    if "error" in run:
        return [{**run, "round": 0}]
    runs = []
    for turn in range(n_turns):
        samples = {}
        for case, seconds in run["samples"].items():
            n = len(seconds) // n_turns
            samples[case] = seconds[turn * n : (turn + 1) * n]
        facts = run if turn == 0 else {k: v for k, v in run.items() if k != "explanation"}
        runs.append({**facts, "samples": samples, "round": turn})
    return runs
