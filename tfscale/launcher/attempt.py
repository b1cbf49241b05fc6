"""Run a launcher once: pass on signals, collect failures, leave no process of the job running."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfscale.config import PREEMPTED, ConfigError
from tfscale.launcher.hosts import StartWatch
from tfscale.launcher.mpi_command import end_processes, find_processes, new_job, set_death_signal
from tfscale.launcher.reports import (
    Report,
    ReportReader,
    describe_caught,
    describe_errors,
    describe_training,
    first_failure,
)
from tfscale.native import mpi_files

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.1
# Seconds after the first failure in which the reports of other ranks are collected. The rank that
# is the cause may report before or after a rank that fails because of it.
_COLLECT_S = 0.3
_COLLECT_CAUSE_S = 2.0
_COLLECT_LEAVING_S = 20.0
# Seconds after the end of all ranks, until processes that keep the launcher waiting are ended, and
# until the launcher itself is, which may wait for such processes on other hosts.
_PIPES_S = 1.0
_LAUNCHER_S = 15.0
# Seconds that srun has to end its ranks on all hosts.
_SRUN_S = 10.0


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP to this process, while it is used as a context.

    `first` is the number of the first signal, or None. Ranks have `grace_s` seconds to end after
    it, and none after a second signal.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._is_repeated = False
        self._deadline: float | None = None
        self._before: dict[int, object] = {}
        self.first: int | None = None

    def __enter__(self) -> StopRequest:
        for number in _FORWARDED:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        self._is_repeated = self.first is not None
        self._deadline = now if self._is_repeated else now + self._grace_s
        self.first = self.first or number

    def describe(self) -> str:
        """Return the part of a message that says when the ranks had to have ended."""
        if self._is_repeated:
            return "at the second signal"
        return f"{self._grace_s:g} s (--grace-s) after {signal.Signals(self.first or 0).name}"

    def is_over(self) -> bool:
        """Return whether the ranks' time to end is over."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def sleep(self, seconds: float) -> None:
        """Sleep, but return early at a signal."""
        deadline = time.monotonic() + seconds
        while self.first is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Outcome:
    """The end of one run of the launcher, and its cause."""

    exit_code: int  # of the job: 0, that of the first rank that failed, else the launcher's
    failure: Report | None = None  # of the first rank that failed; None if no rank reported one
    was_stopped: bool = False  # this process was asked to end
    is_orderly: bool = False  # all ranks left the job together, with any exit status
    notes: str = ""  # printed before the failure: tracebacks of the ranks, and remarks
    reason: str = ""  # printed after it, as the last line
    why: str = ""  # why ranks did not start
    closing: str = ""  # printed after a success

    def describe(self) -> str:
        """Return the lines that explain why the job failed; empty if it did not."""
        if self.failure is not None:
            return self.notes + self.failure.describe() + self.reason
        if self.is_orderly or self.was_stopped:
            return self.notes + self.reason
        if self.why:
            return self.notes + self.why
        return (
            f"{self.notes}tfscale: the launcher ended with exit code {self.exit_code}; "
            "no rank said why.\n"
        )


def _input(is_wanted: bool) -> int | None:
    """Return the launcher's stdin: this process's, or none.

    It is none unless it is wanted, so that the caller's input stays with the caller: in a loop of a
    shell that reads a list of jobs, say. Nor does a process in the background get the terminal.
    """
    if not is_wanted or sys.__stdin__ is None:  # closed
        return subprocess.DEVNULL
    if not os.isatty(0):
        return None
    try:
        is_in_front = os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # the terminal of another session
        is_in_front = False
    # The launcher runs in its own session, where the terminal would not stop it from reading.
    return None if is_in_front else subprocess.DEVNULL


class _Launcher:
    """A running mpiexec or srun, with the reader of its stderr."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        may_kill: bool,
        is_quiet: bool,
        has_stdin: bool,
        watch: StartWatch | None,
    ) -> None:
        self._may_kill, self._watch = may_kill, watch
        self._job, marked = new_job(environ)
        self._ended_at: float | None = None
        self._has_outlived_ranks = False
        # Ranks that had not ended when their time was over; None unless that was so.
        self.cut: set[int] | None = None
        # In a session of its own Ctrl-C reaches the launcher once, through this process.
        try:
            self.process = subprocess.Popen(
                list(command),
                env=marked,
                stdin=_input(has_stdin),
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: set_death_signal(signal.SIGKILL if may_kill else signal.SIGTERM),
            )
        except FileNotFoundError as error:
            remedy = "Install an MPI (pip install mpich), or name an mpiexec with --mpiexec."
            if not may_kill:
                remedy = "Use --slurm in an allocation, and leave it out elsewhere."
            raise ConfigError(
                f"Could not find the program that starts ranks. Received: {command[0]}. {remedy}"
            ) from error
        assert self.process.stderr is not None
        sys.stderr.flush()
        self.reader = ReportReader(self.process.stderr.fileno(), 2, is_quiet)

    def wait(self, stop: StopRequest, stop_signal: int) -> int:
        """Wait for the launcher, or end it after a stop or failure; return its exit code."""
        is_told = False
        while True:
            try:
                code = self.process.wait(timeout=_LOOK_S)
                # Killed after the end of all ranks, whose reports count.
                return 0 if self._has_outlived_ranks else code
            except subprocess.TimeoutExpired:
                pass
            if stop.first is not None and not is_told:
                is_told = True
                self.process.send_signal(stop_signal)
            self.reader.look_for_lost_hosts()
            if stop.first is None:
                self.reader.look_for_absent_ranks()
            if self._watch is not None and self.reader.first_failure_at is None:
                sys.stderr.write(self._watch.look(self.reader.starts()))
                if self._watch.has_failed:
                    self._kill()
                    self.process.wait()
                    return 1
            if stop.is_over():
                # Ranks that have all ended are not cut off, however long the launcher takes.
                if self.cut is None and not self.reader.have_all_ended():
                    self.cut = self.reader.ranks_not_ended()
                self._has_outlived_ranks = self.cut is None
                self._kill()
            # Killing srun would not end the ranks; there the process beside the failed rank does.
            elif (failure := self._collected()) and (self._may_kill or failure.is_absent):
                self._kill()
            elif self.reader.have_all_ended():
                self._end_children()

    def _collected(self) -> Report | None:
        """Return the first failure; None while the time for the others' reports is not over."""
        at, failure = self.reader.first_failure_at, self.reader.failure()
        if at is None or failure is None:
            return None
        is_cause = not (failure.is_told or failure.has_left)
        patience_s = _COLLECT_S if is_cause else _COLLECT_CAUSE_S
        if self.reader.is_cause_to_come():
            patience_s = _COLLECT_LEAVING_S
        is_over = self.reader.have_all_ended() or time.monotonic() - at > patience_s
        return failure if is_over else None

    def _kill(self) -> None:
        files = mpi_files.used_by(find_processes(self._job))
        if not self._may_kill:  # at SIGTERM srun ends its ranks, on all hosts
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_SRUN_S)
        self.process.kill()
        mpi_files.remove(files)

    def _end_children(self) -> None:
        """End processes that ranks started and left running, if they keep the launcher waiting."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        waited_s = time.monotonic() - self._ended_at
        if waited_s < _PIPES_S:
            return
        children = [pid for pid in find_processes(self._job) if not self._is_launcher(pid)]
        if children:
            names = ", ".join(f"{pid} ({_command_of(pid)})" for pid in children)
            sys.stderr.write(
                "tfscale: all ranks have ended. Left of what they started, and ended now: "
                f"{names}.\n"
            )
            end_processes(self._job, keep=self._is_launcher)
            self._ended_at = time.monotonic()
        elif waited_s > _LAUNCHER_S and self.reader.has_other_hosts():
            sys.stderr.write(
                "tfscale: all ranks have ended, and the launcher waits for what one of them left "
                "on another host. The job ends.\n"
            )
            self._has_outlived_ranks = True
            self._kill()

    def _is_launcher(self, pid: int) -> bool:
        """Return whether a process is one of the launcher's own, or the one beside a rank.

        The former are its proxy here, and what it has started without a rank between, such as ssh.
        One that has just ended has no command, and is left to its parent.
        """
        beside, command = set(self.reader.pids_beside()), _command_of(pid)
        if pid in beside or not command or "proxy" in Path(command.partition(" ")[0]).name:
            return True
        above: int | None = pid
        while above is not None and above not in beside:
            if above == self.process.pid:
                return True
            above = _parent_of(above)
        return False

    def end(self, grace_s: float) -> None:
        """End every process of the job on this host."""
        if self.process.poll() is None:
            self._kill()
            self.process.wait()
        end_processes(self._job, grace_s)
        self.reader.join(timeout=2.0)


def _command_of(pid: int) -> str:
    """Return the command of a process, cut short; "" where it has ended."""
    try:
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return ""
    return command_line.decode(errors="replace").strip()[:80]


def _parent_of(pid: int) -> int | None:
    """Return the id of a process's parent; None where it has ended."""
    try:
        # The name before it, in brackets, may hold spaces.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def run_attempt(
    command: Sequence[str],
    environ: Mapping[str, str],
    stop: StopRequest,
    stop_signal: int = signal.SIGTERM,
    may_kill: bool = True,
    is_quiet: bool = False,
    has_stdin: bool = False,
    watch: StartWatch | None = None,
) -> Outcome:
    """Run a launcher until it ends; afterwards no process of the job is left on this host.

    The outcome is not printed yet. After a signal to this process (`stop`) the launcher gets
    `stop_signal`, which makes it stop the ranks; they get their time to end, then SIGKILL.
    `may_kill` says whether ranks end when the launcher is killed; `is_quiet` removes TensorFlow's
    start-up messages; `has_stdin` gives the launcher the standard input of this process,
    and `watch` limits the start of the ranks.
    """
    launcher = _Launcher(command, environ, may_kill, is_quiet, has_stdin, watch)
    failure = None
    try:
        code = launcher.wait(stop, stop_signal)
        failure = launcher.reader.failure()
        if watch is not None and watch.has_failed:
            return Outcome(1, why=watch.describe(launcher.reader.starts(), 1))
    finally:
        launcher.end(grace_s=0.0 if failure or stop.is_over() else 2.0)
    outcome = _outcome(code, launcher, stop)
    if watch is None or outcome.failure or outcome.is_orderly or outcome.was_stopped:
        return outcome
    why = watch.describe(launcher.reader.starts(), outcome.exit_code)
    return dataclasses.replace(outcome, why=why)


def _outcome(code: int, launcher: _Launcher, stop: StopRequest) -> Outcome:
    reader, cut = launcher.reader, launcher.cut
    reports = reader.reports
    if cut is not None:  # their own reports say no more than that they were killed
        reports = [r for r in reports if not (r.rank in cut and r.signal == signal.SIGKILL)]
        cut -= {report.rank for report in reports}
        cut = cut if cut or not reports else None  # all have ended by themselves after all
    failure = first_failure(reports)
    if failure is None and stop.first is None:
        # Only some ranks got a signal and died of it, or a rank ended with the process beside it.
        failure = next((r for r in reports if r.signal is not None and r.has_joined), None)
        if failure is None and code > 0:
            failure = reader.find_unreported()
    codes = {report.exit_code for report in reports} - {0}
    notes, reason = describe_errors(reports, failure), ""
    notes += "".join(r.describe() for r in reports if r.is_unbelieved and not r.is_failure)
    if failure is not None:
        code = failure.exit_code
        reason = reader.explain_wait() if failure.is_told and failure.is_starting else ""
    elif codes:
        code = PREEMPTED if codes == {PREEMPTED} else max(codes - {PREEMPTED})
    elif code != 0 and reader.have_all_ended():
        if stop.first is None:
            notes += (
                "tfscale: all ranks have ended well; what started them ended with exit code "
                f"{code}, which is ignored.\n"
            )
        code = 0
    elif code < 0:
        code = 128 - code
    # Of a rank that has saved, a signal ends no more than its own end.
    has_saved = reader.have_all_saved() and {r.status for r in reports} <= {0, PREEMPTED, None}
    if has_saved:
        code = PREEMPTED
    elif stop.first is not None and (cut is not None or code not in (0, PREEMPTED)):
        code = 128 + stop.first
    if cut is not None:
        reason += _describe_cut(reader.names(cut), stop, has_saved)
    is_orderly = failure is None and (code == 0 or bool(codes))
    if failure is None:
        notes += describe_caught(reports)
    closing = "" if code or stop.first else describe_training(reports)
    was_stopped = stop.first is not None
    return Outcome(code, failure, was_stopped, is_orderly, notes, reason, closing=closing)


def _describe_cut(names: str, stop: StopRequest, has_saved: bool) -> str:
    """Return the line about ranks that were killed since their time to end was over."""
    text = f"tfscale: killed {stop.describe()}, still running: {names or 'the launcher'}."
    if has_saved:
        return f"{text} All ranks had saved before: exit code {PREEMPTED}.\n"
    return f"{text} Not all ranks had reported a checkpoint; --grace-s gives them more time.\n"
