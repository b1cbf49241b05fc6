"""Functions on several ranks: one mpiexec runs many of them, and every wait has an end.

The ranks (`tfscale.testing.worker`) write the outcome of each function to a file, and begin the
next one when all have done so. Comparisons of values, also between ranks, follow at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tfscale
from tfscale.config import environment
from tfscale.testing.processes import start

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 400.0  # many traced functions are freed, perhaps on a busy machine
CASE_TIMEOUT_S = 60.0
_GRACE_S = 4.0  # a rank failed: how long the others may still take


@dataclass(frozen=True)
class RankResult:
    """The outcome of one function on one rank.

    Attributes:
        case: Name of the function, "module:function".
        rank: Number of the rank.
        status: "ok", "failed" (it raised), "skipped" (`unittest.SkipTest` or `pytest.skip`),
            "hang" (no end in time, or soon after another rank failed) or "lost" (no process).
        text: Traceback, reason, or the stacks of a rank that hangs and the output of all ranks.
        seconds: Time that it took.
        value: What it returned: nothing, numbers, texts, or lists and dictionaries of them.

    Examples:
        >>> result = tfscale.testing.RankResult("cases:case_sum", rank=1, status="ok", value=3.0)
        >>> f"{result.case} on rank {result.rank}: {result.status}, {result.value}"
        'cases:case_sum on rank 1: ok, 3.0'
    """

    case: str
    rank: int
    status: str
    text: str = ""
    seconds: float = 0.0
    value: Any = None


def spawn(
    size: int,
    cases: Sequence[str | Callable[[], object]],
    timeout_s: float | Mapping[str, float] = CASE_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run functions on `size` ranks, one after another, and return their outcomes.

    A function takes no arguments and returns what JSON can hold. On its rank tfscale is
    initialised, Keras's seed is 1, and the process sets of earlier functions are gone; it must not
    shut tfscale down. After a failure or a hang on several ranks the remaining functions run in new
    processes.

    Args:
        size: Number of ranks, which the installed MPI starts on this host.
        cases: Functions of modules, or their names as "module:function". Ranks import the module,
            from the current folder or from where this process finds modules.
        timeout_s: Seconds that a function may take; a mapping gives those of single names.
        env: Variables of the ranks in addition to those of this process.

    Returns:
        A `RankResult` for each case and rank, ordered by case, then by rank.

    Raises:
        ConfigError: There is no MPI.

    Examples:
        >>> results = tfscale.testing.spawn(2, [tfscale.size])  # functions of modules
        >>> [(result.rank, result.status, result.value) for result in results]
        [(0, 'ok', 2), (1, 'ok', 2)]
    """
    names = [c if isinstance(c, str) else f"{c.__module__}:{c.__qualname__}" for c in cases]
    limits = timeout_s if isinstance(timeout_s, Mapping) else dict.fromkeys(names, timeout_s)
    results: list[RankResult] = []
    while len(results) < size * len(names):
        with tempfile.TemporaryDirectory(prefix="tfscale-spawn-") as folder:
            job = _Job(size, names[len(results) // size :], limits, Path(folder), env or {})
            try:
                results += job.run()
            finally:
                job.started.end()
    return results


def require_ok(results: Sequence[RankResult]) -> None:
    """Raise an AssertionError with the texts of all ranks on which a function has not passed.

    Examples:
        >>> result = tfscale.testing.RankResult("cases:case_sum", 1, "failed", text="ValueError: 3")
        >>> tfscale.testing.require_ok([result])
        Traceback (most recent call last):
            ...
        AssertionError: cases:case_sum, rank 1: failed
        ValueError: 3
    """
    bad = [f"{r.case}, rank {r.rank}: {r.status}\n{r.text}" for r in results if r.status != "ok"]
    if bad:
        raise AssertionError("\n".join(bad))


def outcome_path(folder: Path, step: int, rank: int) -> Path:
    """Return the file of a rank's outcome; step 0 is its start, step i the i-th function."""
    return folder / f"step-{step}.rank-{rank}.json"


class _Job:
    """One mpiexec, watched until its functions are through or one of them ends it."""

    def __init__(
        self,
        size: int,
        cases: Sequence[str],
        limits: Mapping[str, float],
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self._size, self._cases, self._limits, self._folder = size, cases, limits, folder
        (folder / "cases.json").write_text(json.dumps(cases))
        arguments = [sys.executable, "-m", "tfscale.testing.worker", str(folder)]
        path = [os.getcwd(), *sys.path, environment().get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, path)), **env}
        self.started = start(arguments, folder / "output", size=size, env=env)

    def run(self) -> list[RankResult]:
        """Return the outcomes of the functions that ran: at least the first, perhaps not all."""
        if not self._wait(0, START_TIMEOUT_S):
            return self._give_up(1, f"start within {START_TIMEOUT_S:.0f} s")
        results: list[RankResult] = []
        for step, case in enumerate(self._cases, 1):
            limit_s = self._limits.get(case, CASE_TIMEOUT_S)
            if not self._wait(step, limit_s):
                what = f"end within {limit_s:.0f} s, or soon after another failed"
                return results + self._give_up(step, what)
            outcomes = [self._read(step, rank) for rank in range(self._size)]
            results += outcomes
            if self._size > 1 and any(r.status == "failed" for r in outcomes):
                return results
        if problem := self._problem_of_end():
            text = f"{problem}\noutput of all ranks:\n{self.started.output_tail()}"
            for rank in range(self._size):
                last = results[rank - self._size]
                results[rank - self._size] = RankResult(last.case, rank, "failed", text)
        return results

    def _wait(self, step: int, limit_s: float) -> bool:
        """Wait for the outcomes of all ranks; False if one will not come."""
        files = [outcome_path(self._folder, step, rank) for rank in range(self._size)]
        deadline, has_failure = time.monotonic() + limit_s, False
        while True:
            is_over = time.monotonic() > deadline or self.started.process.poll() is not None
            present = [file for file in files if file.exists()]
            if is_over or len(present) == self._size:
                return len(present) == self._size
            if not has_failure and any('"failed"' in file.read_text() for file in present):
                has_failure = True
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(0.005)

    def _read(self, step: int, rank: int) -> RankResult:
        content = json.loads(outcome_path(self._folder, step, rank).read_text())
        return RankResult(self._cases[step - 1], rank, **content)

    def _give_up(self, step: int, what: str) -> list[RankResult]:
        """Return the outcomes of a function that not all ranks finished."""
        code = self.started.process.poll()
        stacks = self._dump_stacks() if code is None else {}
        if code is not None:
            what = f"end: the ranks were gone, exit code {code}"
        results = []
        for rank in range(self._size):
            if outcome_path(self._folder, step, rank).exists():
                results.append(self._read(step, rank))
                continue
            stack = stacks.get(str(rank)) or "\n".join(stacks.values())
            output = self.started.output_tail()
            text = f"rank {rank} did not {what}\n{stack}\noutput of all ranks:\n{output}"
            status = "hang" if code is None else "lost"
            results.append(RankResult(self._cases[step - 1], rank, status, text))
        return results

    def _dump_stacks(self) -> dict[str, str]:
        """Return the stacks of all threads by rank; by "" and process id before a rank knows."""
        files = {tuple(f.name.split(".")[1:]): f for f in self._folder.glob("stacks.*")}
        asked = []
        for (_, pid), file in files.items():
            if Path("/proc", pid).exists():
                os.kill(int(pid), signal.SIGUSR1)
                asked.append(file)
        time.sleep(0.5)
        deadline = time.monotonic() + 5.0  # a stopped process writes nothing
        while time.monotonic() < deadline and not all(file.stat().st_size for file in asked):
            time.sleep(0.1)
        return {rank or pid: file.read_text() for (rank, pid), file in files.items()}

    def _problem_of_end(self) -> str:
        """Wait for the end of the job; one that passes its functions and cannot end has failed."""
        try:
            code = self.started.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            stacks = "\n".join(self._dump_stacks().values())
            return f"the ranks did not end within {END_TIMEOUT_S:.0f} s\n{stacks}"
        return f"the ranks ended with exit code {code}" if code else ""


def require_identical(found: Iterable[Any], expected: Iterable[Any], message: str = "") -> None:
    """Require equal arrays, tensors or variables, pair by pair.

    Examples:
        >>> tfscale.testing.require_identical([tf.constant([1.0])], [np.array([1.0])])
        >>> tfscale.testing.require_identical([tf.constant([1.5])], [np.array([1.0])], "the weight")
        Traceback (most recent call last):
            ...
        AssertionError:
        Arrays are not equal
        the weight
        ...
    """
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(_array(mine), _array(wanted), err_msg=message)


def require_close(
    found: Iterable[Any],
    expected: Iterable[Any],
    *,
    atol: float = 1e-10,
    rtol: float = 0.0,
    message: str = "",
) -> None:
    """Require arrays, tensors or variables that differ by `atol + rtol * abs(expected)` at most.

    Examples:
        >>> tfscale.testing.require_close([tf.constant([1.01])], [np.array([1.0])], atol=0.1)
        >>> tfscale.testing.require_close([tf.constant([1.5])], [np.array([1.0])], atol=0.1)
        Traceback (most recent call last):
            ...
        AssertionError:
        Not equal to tolerance rtol=0, atol=0.1
        ...
    """
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            _array(mine), _array(wanted), rtol=rtol, atol=atol, err_msg=message
        )


def require_equal_ranks(variables: Iterable[Any]) -> None:
    """Require that variables are equal bit for bit on all ranks. Collective.

    The error is the same on all ranks, so that none of them waits for another.

    Examples:
        >>> def compare(rank):
        ...     tfscale.testing.require_equal_ranks([np.zeros(2), np.array([rank])])
        >>> tfscale.init()
        >>> first, second = tfscale.testing.FakeRanks(2).run(compare)
        >>> "rank 1 differs from that of rank 0" in str(first)  # and so on rank 1
        True
    """
    named = [(getattr(v, "path", ""), np.asarray(_array(v))) for v in variables]
    values_by_rank = tfscale.allgather_object(named)
    for rank, theirs in enumerate(values_by_rank):
        for (name, value), (_, first) in zip(theirs, values_by_rank[0], strict=True):
            if value.dtype != first.dtype or value.tobytes() != first.tobytes():
                message = f"{name or 'a value'} of rank {rank} differs from that of rank 0"
                np.testing.assert_array_equal(value, first, err_msg=message, strict=True)
                raise AssertionError(f"{message}: in the sign of a zero or the bits of a NaN")


def _array(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value
