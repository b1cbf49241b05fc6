"""A study and the run it waits for: one study per folder, and no run that outlives its study."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

# Seconds for a run to end after it was asked, and asked again: `tfscale run` gives its ranks 30
# after the first signal and none after the second.
PATIENCE_S = (45.0, 10.0)
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP exceptions, so that `call` ends the run it waits for."""
    for number in _ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, say
            signal.signal(number, _leave)


def _leave(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[IO[str]]:
    """Keep other studies out of a folder as long as the context lasts.

    Args:
        folder: Of the runs; made if it is missing.

    Yields:
        The locked file. A process that inherits it keeps the folder locked until its own end.

    Raises:
        SystemExit: Another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                f"Only one study.py may run in {folder} at a time. Received: a second one; the "
                "first, or a run that it has started, is still there. Wait for it or end it, or "
                "pass another --run-dir."
            )
        except OSError as error:  # file systems of clusters may have no locks
            print(f"{folder} cannot be locked ({error}): start no second study.py in it.")
        yield lock


def call(words: Sequence[str], log: Path, lock: IO[str] | None = None) -> int:
    """Run a command and return its exit code; whatever ends this function ends the command too.

    Args:
        words: The command.
        log: File to which its output is appended.
        lock: What `only_one` has locked: it stays so while the command runs, even if this
            process is killed.
    """
    held = () if lock is None else (lock.fileno(),)
    with open(log, "a", encoding="utf-8") as file:
        # Signals wait until there is a child that they can end.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        try:
            # A session of its own: Ctrl-C reaches the command once, through this process.
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=held,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return child.wait()
        except BaseException:
            _end(child)
            raise


def _end(child: subprocess.Popen) -> None:
    """Ask a command to end, ask again, kill it; a further signal to us shortens the waiting."""
    for patience_s in PATIENCE_S:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, SystemExit, KeyboardInterrupt):
            child.wait(patience_s)
            return
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
