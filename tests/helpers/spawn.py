"""Run test bodies on several ranks: one mpiexec runs many functions, every wait has an end.

    results = spawn(2, ["tests.parallel.cases_allreduce:case_sum"], timeout_s=60)

A function takes no arguments and uses `tfscale.rank()` and `tfscale.size()`. A hang is a failure
that shows the stacks of the ranks that hang. After a failure or a hang the remaining functions
run in fresh processes.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.helpers.launching import Started, start_ranks

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 120.0
_CASE_GRACE_S = 4.0  # a rank failed: how long the others may still take
_Function = TypeVar("_Function", bound=Callable[[], None])


@dataclass(frozen=True)
class RankResult:
    """The outcome of one function on one rank."""

    case: str
    rank: int
    status: str
    text: str = ""
    seconds: float = 0.0


def sizes(*allowed: int, timeout_s: float | None = None) -> Callable[[_Function], _Function]:
    """Restrict a case to some numbers of ranks, or give it a time limit of its own."""

    def mark(function: _Function) -> _Function:
        function.allowed_sizes = allowed  # type: ignore[attr-defined]
        function.timeout_s = timeout_s  # type: ignore[attr-defined]
        return function

    return mark


def engine_only(why: str) -> Callable[[_Function], _Function]:
    """Leave a case out on the Horovod backend; `ENGINE_ONLY = why` in a module leaves out all."""

    def mark(function: _Function) -> _Function:
        function.engine_only = why  # type: ignore[attr-defined]
        return function

    return mark


def spawn(
    size: int,
    cases: Sequence[str],
    timeout_s: float | Mapping[str, float] = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run functions on `size` ranks, one after another; 60 s each where no limit is given."""
    results: list[RankResult] = []
    remaining = list(cases)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="tfscale-spawn-") as folder:
            limits = (
                timeout_s if isinstance(timeout_s, Mapping) else dict.fromkeys(cases, timeout_s)
            )
            done = _Spawn(size, remaining, limits, Path(folder), env or {}).run()
        results += done
        remaining = remaining[len(done) // size :]
    return results


def cases_of(module: str) -> list[str]:
    """Return the names of the cases of a module, which only ranks import."""
    source = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    functions = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef)]
    return [f"{module}:{f.name}" for f in functions if f.name.startswith("case_")]


def require_ok(results: Sequence[RankResult]) -> None:
    """Fail with the texts of all ranks on which a case has not passed."""
    bad = [r for r in results if r.status != "ok"]
    assert not bad, "\n".join(f"{r.case}, rank {r.rank}: {r.status}\n{r.text}" for r in bad)


class _Spawn:
    """One mpiexec, watched until its cases are through or one of them ends it."""

    def __init__(
        self,
        size: int,
        cases: Sequence[str],
        limits: Mapping[str, float],
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self._size, self._cases, self._limits, self._folder = size, cases, limits, folder
        (folder / "cases.json").write_text(json.dumps(list(cases)))
        command = [sys.executable, "-m", "tests.helpers.worker", str(folder)]
        self._started: Started = start_ranks(size, command, env, folder / "output")

    def run(self) -> list[RankResult]:
        """Return the results of the cases that ran: at least the first, perhaps not all."""
        results: list[RankResult] = []
        try:
            if not self._wait("ready", START_TIMEOUT_S):
                return self._give_up(0, f"start within {START_TIMEOUT_S:.0f} s")
            for index, case in enumerate(self._cases):
                limit_s = self._limits.get(case, 60.0)
                if not self._wait(f"case-{index}", limit_s):
                    what = f"end within {limit_s:.0f} s, or soon after another failed"
                    return results + self._give_up(index, what)
                outcomes = [self._read(index, rank) for rank in range(self._size)]
                results += outcomes
                statuses = {outcome.status for outcome in outcomes}
                if "failed" in statuses and self._size > 1:
                    return results
            self._finish(results)
        finally:
            self._started.end()
        return results

    def _files(self, name: str) -> list[Path]:
        return [self._folder / f"{name}.rank-{rank}.json" for rank in range(self._size)]

    def _wait(self, name: str, limit_s: float) -> bool:
        """Wait for every rank's file; False if one will not come."""
        deadline = time.monotonic() + limit_s
        has_failure = False
        while time.monotonic() < deadline:
            present = [f for f in self._files(name) if f.exists()]
            if len(present) == self._size:
                return True
            if self._started.process.poll() is not None:
                return all(f.exists() for f in self._files(name))
            if not has_failure and any('"failed"' in f.read_text() for f in present):
                has_failure = True
                deadline = min(deadline, time.monotonic() + _CASE_GRACE_S)
            time.sleep(0.005)
        return False

    def _read(self, index: int, rank: int) -> RankResult:
        content: dict[str, Any] = json.loads(self._files(f"case-{index}")[rank].read_text())
        return RankResult(self._cases[index], rank, **content)

    def _give_up(self, index: int, what: str) -> list[RankResult]:
        """Results of a case that not all ranks finished, with the stacks of those that hang."""
        is_alive = self._started.process.poll() is None
        stacks = self._dump_stacks() if is_alive else {}
        output = self._started.output_tail()
        if not is_alive:
            what = f"end: the ranks were gone, exit code {self._started.process.returncode}"
        results = []
        for rank, file in enumerate(self._files(f"case-{index}")):
            if file.exists():
                results.append(self._read(index, rank))
                continue
            ready = self._files("ready")[rank]
            pid = json.loads(ready.read_text())["pid"] if ready.exists() else 0
            text = stacks.get(pid) or "\n".join(stacks.values())
            text = f"rank {rank} did not {what}\n{text}\noutput of all ranks:\n{output}"
            status = "hang" if is_alive else "lost"
            results.append(RankResult(self._cases[index], rank, status, text))
        return results

    def _dump_stacks(self) -> dict[int, str]:
        files = {int(f.name.rpartition("-")[2]): f for f in self._folder.glob("stacks.pid-*")}
        for pid in files:
            try:
                os.kill(pid, signal.SIGUSR1)
            except ProcessLookupError:
                continue
        time.sleep(0.5)
        return {pid: file.read_text() for pid, file in files.items()}

    def _finish(self, results: list[RankResult]) -> None:
        """A job that passes its cases and cannot end has failed its last case."""
        try:
            code = self._started.process.wait(END_TIMEOUT_S)
            problem = f"the ranks ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            stacks = "\n".join(self._dump_stacks().values())
            problem = f"the ranks did not end within {END_TIMEOUT_S:.0f} s\n{stacks}"
        if problem:
            text = f"{problem}\noutput of all ranks:\n{self._started.output_tail()}"
            last = results[-self._size :]
            results[-self._size :] = [
                RankResult(r.case, r.rank, "failed", f"{r.text}\n{text}", r.seconds) for r in last
            ]
