"""Looks after one rank: starts it, says how it ended, and ends the job where the others would wait.

`tfscale run` puts this between the launcher of the MPI and the program, on every host:
`python -m tfscale.launcher.rank_process -- python train.py`. The launcher sees this process, which
outlives the rank, so that whatever ends a rank there is time to tell; and then, if it was a
failure, a process that dies of SIGKILL, at which every launcher ends all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from tfscale.comm import process
from tfscale.comm.process import STATUS_VARIABLE, STOP_VARIABLE, Launch, discover
from tfscale.config import PREEMPTED, environment
from tfscale.launcher.reports import BEAT_S, BEAT_VARIABLE, Beat, Report, encode, encode_beat

# After a report, until this process ends the job itself; `tfscale run` is faster.
PATIENCE_S = 3.0
_LOOK_S = 1.0
# A signal to a process group may reach the rank first, and this process so much later.
_SAME_SIGNAL_S = 0.2
_PR_SET_PDEATHSIG = 1
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_NOT_STARTED = 127


class _Rank:
    """The program as a child process, which does not outlive this one."""

    def __init__(self, command: Sequence[str], launch: Launch) -> None:
        self.number = launch.rank
        # srun, and mpirun of Open MPI: they pass on this signal, and the rank is to get SIGTERM.
        name = environment().get(STOP_VARIABLE)
        self._stop_signal = signal.Signals[name] if name else None
        self._stops = {*_STOPS, *({self._stop_signal} if self._stop_signal else ())}
        self._parent = os.getppid()
        self._is_beating, self._next_beat = bool(environment().get(BEAT_VARIABLE)), 0.0
        self._watched = {*self._stops, signal.SIGCHLD}
        # Before the child exists: a signal must find it or wait.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        self.status = process.create()
        self.was_stopped = False
        # Jobs that the rank starts have launchers of their own.
        own = {name: value for name, value in environment().items() if name != STOP_VARIABLE}
        self._process = subprocess.Popen(
            list(command),
            env={**own, STATUS_VARIABLE: process.path_of(self.status)},
            close_fds=False,  # MPI may talk to its launcher over an inherited descriptor.
            preexec_fn=self._prepare,
        )

    def _prepare(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._stop_signal:
            # Slurm signals its tasks alone, their process groups, or all processes, as configured.
            # The rank gets SIGTERM from here, and must not end by what stands for it.
            os.setpgid(0, 0)
            signal.signal(self._stop_signal, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def wait(self) -> int:
        """Return the exit status; negative: the signal that ended the rank."""
        while (code := self._process.poll()) is None:
            self._beat()
            received = signal.sigtimedwait(self._watched, _LOOK_S)
            if received is not None and received.si_signo in self._stops:
                self._stop(received.si_pid)
            if os.getppid() != self._parent:
                self._process.kill()  # The launcher has died: nobody else would end this rank.
        if -code in self._stops and signal.sigtimedwait(self._stops, _SAME_SIGNAL_S):
            self.was_stopped = True
        return code

    def _beat(self) -> None:
        """Send a sign of life, where `tfscale run` wants them."""
        if self._is_beating and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            self._write(Beat(self.number, socket.gethostname()))

    def end_beats(self) -> None:
        """Tell that there are no more to come."""
        if self._is_beating:
            self._write(Beat(self.number, socket.gethostname(), is_last=True))

    def _write(self, beat: Beat) -> None:
        # The rank shares this file, and may have made it non-blocking or closed its other end.
        with contextlib.suppress(OSError):
            os.write(2, encode_beat(beat))

    def _stop(self, sender: int) -> None:
        self.was_stopped = True
        # MPICH signals the whole process group; anybody else means this process alone.
        if sender != self._parent or self._stop_signal:
            self._process.send_signal(signal.SIGTERM)


def judge(launch: Launch, code: int, status: process.RankStatus, was_stopped: bool) -> Report:
    """Decide whether the others can live with how a rank ended.

    Args:
        launch: Which rank it is.
        code: Exit status; negative: the signal that ended it.
        status: What it said of itself.
        was_stopped: It had been asked to end.

    Returns:
        A failure, unless the rank ended with 0 or after all had left the job, or was asked to
        end, or is a job of its own, or ended with `PREEMPTED`.
    """
    is_told = status.state in (process.TOLD, process.WAITING)
    if code < 0:
        is_failure = not (was_stopped and -code in _STOPS)
    elif code == 0:
        is_failure = status.state in (process.JOINED, process.TOLD)
    else:
        is_failure = status.state != process.FINISHED and code != PREEMPTED
    return Report(
        rank=launch.rank,
        host=socket.gethostname(),
        status=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        is_failure=is_failure and status.state != process.ALONE,
        has_joined=status.state not in ("", process.WAITING, process.ALONE),
        place=status.place,
        error=status.error,
        is_told=is_told,
    )


def _tell(report: Report) -> None:
    sys.stderr.flush()
    os.write(2, encode(report))


def main(command: Sequence[str]) -> int:
    """Run a rank to its end.

    Args:
        command: Program and arguments.

    Returns:
        The rank's exit status; 0 for one that had left the job: `tfscale run` knows the status
        from the report, and mpirun and srun would end ranks that are still leaving. Does not
        return after a failure: this process dies of SIGKILL.
    """
    launch = discover(environment()) or Launch(0, 1, None, None, "none")
    try:
        rank = _Rank(command, launch)
    except OSError as error:
        text = f"Cannot start {' '.join(command)}: {error}\n"
        status = process.RankStatus("", "", text)
        report = judge(launch, _NOT_STARTED, status, False)
    else:
        code = rank.wait()
        status = process.read(rank.status)
        report = judge(launch, code, status, rank.was_stopped)
        if not report.is_failure:
            rank.end_beats()
    if report.exit_code:
        _tell(report)
    if report.is_failure:
        time.sleep(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    has_left = status.state in (process.FINISHED, process.ALONE)
    return 0 if has_left and report.status is not None else report.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:][sys.argv[1:2] == ["--"] :]))
