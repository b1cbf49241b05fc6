"""Commands that a test starts, on ranks or alone, and ends for sure."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfscale.config import environment
from tfscale.launcher import mpi_command
from tfscale.native.cores import count_cores


@dataclass(frozen=True)
class Started:
    """A running command, with all processes that it starts on this host."""

    process: subprocess.Popen[bytes]
    job: str
    output: Path

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        mpi_command.end_processes(self.job, grace_s=0.0)

    def output_tail(self, characters: int = 6000) -> str:
        """Return the end of what was written until now."""
        return _read(self.output)[-characters:]


def _read(path: Path) -> str:
    # As bytes: progress bars contain carriage returns, which read_text makes new lines of.
    return path.read_bytes().decode(errors="replace")


def start(
    command: Sequence[str],
    output: Path,
    *,
    size: int = 0,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    errors: Path | None = None,
) -> Started:
    """Start a command and return at once.

    Args:
        command: Words of the command.
        output: File for what is written, to standard error too unless `errors` is another file.
        size: Number of ranks, which the installed MPI starts; 0 starts the command as it is.
        env: Variables in addition to those of this process.
        folder: Folder to start in, by default the current one.
        errors: File for what is written to standard error.
    """
    arguments, variables = list(command), dict(env or {})
    if size:
        is_root, n_cores = os.geteuid() == 0, count_cores()
        spec = mpi_command.LaunchSpec(tuple(arguments), size, is_root=is_root, n_cores=n_cores)
        mpi = mpi_command.find_mpi()
        arguments = mpi_command.build_command(spec, mpi)
        variables |= mpi_command.allocation_variables(spec, mpi, {**environment(), **variables})
    job, environ = mpi_command.new_job({**environment(), **variables})
    with output.open("wb") as file, (errors or Path(os.devnull)).open("wb") as error_file:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=error_file if errors else subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(process, job, output)


@dataclass(frozen=True)
class Finished:
    """The end of a command.

    Attributes:
        exit_code: That of the command or of its launcher; None if the time was over.
        output: What was written to standard output, and to standard error if that was not apart.
        errors: What was written to standard error, if that was asked for.
        seconds: Time that it took.

    Examples:
        >>> import sys
        >>> command = [sys.executable, "-c", "raise SystemExit('no data')"]
        >>> finished = tfscale.testing.run_command(command, timeout_s=60, errors_apart=True)
        >>> type(finished).__name__, finished.exit_code, finished.errors.strip()
        ('Finished', 1, 'no data')
    """

    exit_code: int | None
    output: str
    errors: str
    seconds: float


def run_command(
    command: Sequence[str],
    timeout_s: float,
    *,
    size: int = 0,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    errors_apart: bool = False,
) -> Finished:
    """Run a command to its end, on ranks of its own or alone; no process of it is left.

    Args:
        command: Words, such as `[sys.executable, "train.py"]`.
        timeout_s: Seconds after which it is killed.
        size: Number of ranks, which the installed MPI starts; 0 runs the command as it is.
        env: Variables in addition to those of this process.
        folder: Folder to run in, by default the current one.
        errors_apart: Whether `Finished.errors` gets what is written to standard error.

    Raises:
        ConfigError: There is no MPI.

    Examples:
        >>> import sys
        >>> command = [sys.executable, "-c", "print('trained')"]
        >>> finished = tfscale.testing.run_command(command, timeout_s=60)
        >>> finished.exit_code, finished.output.strip()
        (0, 'trained')
    """
    with tempfile.TemporaryDirectory(prefix="tfscale-command-") as name:
        output, errors = Path(name) / "output", Path(name) / "errors"
        errors.touch()
        error_file = errors if errors_apart else None
        began = time.monotonic()
        started = start(command, output, size=size, env=env, folder=folder, errors=error_file)
        code: int | None = None
        try:
            code = started.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            seconds = time.monotonic() - began
            started.end()
        return Finished(code, _read(output), _read(errors), seconds)
