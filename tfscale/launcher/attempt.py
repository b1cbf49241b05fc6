"""Run a launcher once, to its end: signals passed on, failures told, no rank left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfscale.config import PREEMPTED
from tfscale.launcher.mpi_command import end_processes, new_job
from tfscale.launcher.reports import Report, ReportReader

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.1
# After the first failure: others that fail for the same reason have a moment to say so.
_COLLECT_S = 0.3


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP to this process, while it is used as a context.

    Attributes:
        first: Number of the first signal; None without.
    """

    def __init__(self, grace_s: float) -> None:
        """Wait for signals.

        Args:
            grace_s: Seconds that ranks have to end after the first signal; none after a second.
        """
        self._grace_s = grace_s
        self._deadline: float | None = None
        self._before: dict[int, object] = {}
        self.first: int | None = None

    def __enter__(self) -> StopRequest:
        """Take the signals."""
        for number in _FORWARDED:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        self._deadline = now if self.first is not None else now + self._grace_s
        self.first = self.first or number

    def is_over(self) -> bool:
        """Return whether ranks have had their time to end."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def sleep(self, seconds: float) -> None:
        """Sleep, or return at a signal."""
        deadline = time.monotonic() + seconds
        while self.first is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        exit_code: Of the job: 0, that of the first rank that failed, else the launcher's.
        failure: Report of the first rank that failed; None where none said so.
        was_stopped: Somebody asked this process to end.
        is_orderly: All ranks left the job together, whatever their exit status.
    """

    exit_code: int
    failure: Report | None = None
    was_stopped: bool = False
    is_orderly: bool = False

    def describe(self) -> str:
        """Return the lines that say why the job failed, for people; empty where it did not."""
        if self.failure is not None:
            return self.failure.describe()
        if self.is_orderly or self.was_stopped:
            return ""
        return f"tfscale: the launcher ended with exit code {self.exit_code}; no rank said why.\n"


def _input() -> int | None:
    """Return what a launcher reads from: a shell keeps its terminal where this runs behind it."""
    if not os.isatty(0):
        return None
    try:
        is_in_front = os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # the terminal of another session
        is_in_front = False
    # A launcher has a session of its own, where nothing would stop it from reading.
    return None if is_in_front else subprocess.DEVNULL


class _Launcher:
    """mpiexec or srun, and what it prints."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], may_kill: bool) -> None:
        self._may_kill = may_kill
        # A session of its own: a terminal's Ctrl-C reaches the launcher once, through us.
        self.process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=_input(),
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=self._end_with_parent,
        )
        assert self.process.stderr is not None
        sys.stderr.flush()
        self.reader = ReportReader(self.process.stderr.fileno(), 2)

    def _end_with_parent(self) -> None:
        number = signal.SIGKILL if self._may_kill else signal.SIGTERM
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)

    def wait(self, stop: StopRequest, stop_signal: int) -> int:
        """Wait for its end, and see to it that it comes; return its exit code."""
        is_told = False
        while True:
            try:
                return self.process.wait(timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                pass
            if stop.first is not None and not is_told:
                is_told = True
                self.process.send_signal(stop_signal)
            self.reader.look_for_lost_hosts()
            failed_at = self.reader.first_failure_at
            has_failed = failed_at is not None and time.monotonic() - failed_at > _COLLECT_S
            # srun would leave the ranks alone; the one that failed ends them there.
            if stop.is_over() or (has_failed and self._may_kill):
                self.process.kill()


def run_attempt(
    command: Sequence[str],
    environ: Mapping[str, str],
    stop: StopRequest,
    stop_signal: int = signal.SIGTERM,
    may_kill: bool = True,
) -> Outcome:
    """Run a launcher until it ends.

    Args:
        command: From `build_command`; ranks run under `tfscale.launcher.rank_process`.
        environ: Environment variables of the launcher.
        stop: Signals to this process; the ranks get SIGTERM and their time to end, then they are
            killed.
        stop_signal: What makes the launcher send ranks a signal that they take for SIGTERM.
        may_kill: Ranks end when the launcher is killed.

    Returns:
        How it ended. No process of the job is left on this host. Nothing that says which rank
        failed has been printed; see `Report.describe`.
    """
    job, marked = new_job(environ)
    launcher = _Launcher(command, marked, may_kill)
    failure = None
    try:
        code = launcher.wait(stop, stop_signal)
        failure = launcher.reader.failure()
    finally:
        if launcher.process.poll() is None:
            launcher.process.kill()
            launcher.process.wait()
        end_processes(job, grace_s=0.0 if failure or stop.is_over() else 2.0)
        launcher.reader.join(timeout=2.0)
    return _judge(code, launcher.reader, stop)


def _judge(code: int, reader: ReportReader, stop: StopRequest) -> Outcome:
    failure = reader.failure()
    if failure is None and stop.first is None:  # only some were asked to end, and died of it
        failure = next((r for r in reader.reports if r.signal is not None and r.has_joined), None)
    if failure is not None:
        code = failure.exit_code
    elif reader.reports:
        codes = {report.exit_code for report in reader.reports}
        code = PREEMPTED if codes == {PREEMPTED} else max(codes - {PREEMPTED})
    elif code < 0:
        code = 128 - code
    if stop.first is not None and (stop.is_over() or code not in (0, PREEMPTED)):
        code = 128 + stop.first
    is_orderly = failure is None and (code == 0 or bool(reader.reports))
    return Outcome(code, failure, stop.first is not None, is_orderly)
