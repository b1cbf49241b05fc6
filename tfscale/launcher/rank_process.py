"""The process beside a rank: start the rank, report its end, end the job if others would wait.

`tfscale run` puts it between the launcher of the MPI and the program, on every host:
`python -m tfscale.launcher.rank_process -- python train.py`. This process outlives the rank, so it
can report every kind of end. After a failure it dies of SIGKILL, and then every launcher ends all
other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from tfscale.comm import process
from tfscale.comm.process import RANK_VARIABLE, STATUS_VARIABLE, STOP_VARIABLE, Launch, discover
from tfscale.config import PREEMPTED, environment
from tfscale.launcher import mpi_command
from tfscale.launcher.reports import BEAT_S, BEAT_VARIABLE, Beat, Change, Report, Start, send
from tfscale.native import mpi_files

# Seconds after the report of a failure until this process ends the job; `tfscale run` is faster.
PATIENCE_S = 3.0
# The same for a failure of communication: the rank that is the cause may still be ending.
_PATIENCE_TOLD_S = 25.0
_LOOK_S, _LOOK_AFTER_STOP_S = 0.5, 0.1
# A signal to a process group may reach the rank first, and this process up to so much later.
_SAME_SIGNAL_S = 0.2
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_NOT_STARTED = 127
# States in which a rank may not have opened MPI's files yet.
_BEFORE_MPI = ("", process.STARTING)
# Variables that the rank does not inherit.
_NOT_INHERITED = (STOP_VARIABLE, RANK_VARIABLE, mpi_command.STDIN_VARIABLE)


class _Rank:
    """The program as a child process that does not outlive this process."""

    def __init__(self, command: Sequence[str], launch: Launch) -> None:
        self.number = launch.rank
        # srun and Open MPI's mpirun pass on this signal; the rank gets SIGTERM instead.
        name = environment().get(STOP_VARIABLE)
        self._stop_signal = signal.Signals[name] if name else None
        self._stops = {*_STOPS, *({self._stop_signal} if self._stop_signal else ())}
        self._parent = os.getppid()
        self._is_beating, self._next_beat = bool(environment().get(BEAT_VARIABLE)), 0.0
        self._watched = {*self._stops, signal.SIGCHLD}
        # Block signals until the child exists, so that none is lost.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        self.status = process.create()
        self.was_stopped = False
        self._files: set[str] = set()
        self._seen = process.RankStatus("")
        _close_listening_sockets()
        # Launchers give the other ranks a pipe into which nothing is ever written.
        has_stdin = launch.rank == 0 and mpi_command.STDIN_VARIABLE in environment()
        inherited = {name: v for name, v in environment().items() if name not in _NOT_INHERITED}
        self._process = subprocess.Popen(
            list(command),
            env={**inherited, STATUS_VARIABLE: process.path_of(self.status)},
            stdin=None if has_stdin else subprocess.DEVNULL,
            close_fds=False,  # MPI may talk to its launcher over an inherited descriptor.
            preexec_fn=self._prepare,
        )

    def _prepare(self) -> None:
        mpi_command.set_death_signal(signal.SIGKILL)
        if self._stop_signal:
            # Slurm signals its tasks alone, their process groups, or all processes, as configured.
            # The rank gets SIGTERM from this process, and must not end by Slurm's signal.
            os.setpgid(0, 0)
            signal.signal(self._stop_signal, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def wait(self) -> int:
        """Wait for the rank's end; return its exit status, or minus the signal that ended it."""
        while (code := self._process.poll()) is None:
            if self._is_beating and time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + BEAT_S
                send(Beat(self.number, socket.gethostname()))
            self._look_at_status()
            look_s = _LOOK_AFTER_STOP_S if self.was_stopped else _LOOK_S
            received = signal.sigtimedwait(self._watched, look_s)
            if received is not None and received.si_signo in self._stops:
                self._stop(received.si_pid)
            if os.getppid() != self._parent:
                self._process.kill()  # The launcher has died, and nothing else ends this rank.
        if -code in self._stops and signal.sigtimedwait(self._stops, _SAME_SIGNAL_S):
            self.was_stopped = True
        return code

    def _look_at_status(self) -> None:
        before, self._seen = self._seen, process.read(self.status)
        state, has_saved = self._seen.state, self._seen.has_saved
        if state in _BEFORE_MPI:  # MPI may be starting
            self._files |= self._find_files()
        elif before.state in _BEFORE_MPI and state == process.JOINED:
            mpi_files.remove(self._files | self._find_files())  # all ranks have opened them
        if (state, has_saved) == (before.state, before.has_saved):
            return
        if has_saved or state in (process.STARTING, process.LEFT):
            send(Change(self.number, state, has_saved))

    def _find_files(self) -> set[str]:
        """Return the files that MPI made for this rank and for the parent of this process."""
        pids = [self._process.pid, *([self._parent] if os.getppid() == self._parent else [])]
        return mpi_files.used_by(pids)

    def remove_files(self) -> None:
        """Remove the files that MPI made for this job on this host, as the job ends."""
        job = environment().get(mpi_command.JOB_VARIABLE)
        others = mpi_command.find_processes(job) if job else []
        mpi_files.remove(self._files | self._find_files() | mpi_files.used_by(others))

    def _stop(self, sender: int) -> None:
        self.was_stopped = True
        # MPICH signals the whole process group, the rank included; other senders only this process.
        if sender != self._parent or self._stop_signal:
            self._process.send_signal(signal.SIGTERM)


def _close_listening_sockets() -> None:
    """Close the launcher's listening sockets, which this process inherits by mistake."""
    for name in os.listdir("/proc/self/fd"):
        with (
            contextlib.suppress(OSError),  # the descriptor of the listing, or not a socket
            socket.socket(fileno=os.dup(int(name))) as candidate,
        ):
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.close(int(name))


# States in which other ranks count on this one.
_NEEDED = (process.STARTING, process.JOINED, process.LEAVING, process.LEFT, process.TOLD)


def report_end(launch: Launch, code: int, status: process.RankStatus, was_stopped: bool) -> Report:
    """Return the report of a rank's end, and whether it is a failure for the other ranks.

    It is a failure unless the rank ended with 0 while not needed by others, after all had left the
    job, after it was asked to end, or as a job of its own. Exit code `PREEMPTED` needs a request.
    `code` is the exit status, or minus the signal that ended the rank.
    """
    was_asked = was_stopped or status.was_asked
    if code < 0:
        is_failure = not (was_stopped and -code in _STOPS)
    elif code == 0:
        is_failure = status.state in _NEEDED
    else:
        is_failure = status.state != process.FINISHED and not (code == PREEMPTED and was_asked)
    return Report(
        rank=launch.rank,
        host=socket.gethostname(),
        status=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        is_failure=is_failure and status.state != process.ALONE,
        has_joined=status.state not in ("", process.STARTING, process.WAITING, process.ALONE),
        place=status.place,
        error=status.error,
        is_told=status.state in (process.TOLD, process.WAITING),
        has_left=status.state == process.LEFT,
        was_asked=was_asked,
        training=status.training,
        is_starting=status.state in (process.STARTING, process.WAITING),
        has_saved=status.has_saved,
        failed=status.failed,
    )


def main(command: Sequence[str]) -> int:
    """Run a rank to its end and return its status; after a failure this process dies of SIGKILL.

    The status is 0 for a rank that had left the job: `tfscale run` knows it from the report, and
    mpirun and srun would end ranks that are still leaving.
    """
    launch = discover(environment()) or Launch(0, 1, None, None, "none")
    send(Start(launch.rank, socket.gethostname(), os.getpid(), launch.size))
    rank = None
    try:
        rank = _Rank(command, launch)
    except OSError as error:
        status = process.RankStatus("", error=f"Cannot start {' '.join(command)}: {error}\n")
        report = report_end(launch, _NOT_STARTED, status, False)
    else:
        code = rank.wait()
        status = process.read(rank.status)
        report = report_end(launch, code, status, rank.was_stopped)
    sys.stderr.flush()
    send(report)
    if rank is not None and (report.is_failure or report.signal is not None):
        rank.remove_files()
    if report.is_failure:
        time.sleep(_PATIENCE_TOLD_S if report.is_told else PATIENCE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    has_left = status.state in (process.FINISHED, process.ALONE)
    return 0 if has_left and report.status is not None else report.exit_code


if __name__ == "__main__":
    words = sys.argv[1:]
    # A command with ":", which mpiexec takes for the end of a command, is passed as JSON.
    sys.exit(main(json.loads(words[1]) if words[0] == mpi_command.WORDS_OPTION else words[1:]))
