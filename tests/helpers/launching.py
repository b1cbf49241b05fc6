"""Start ranks for a test, and end them for sure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.environment import QUIET
from tfscale.launcher.mpi_command import (
    LaunchSpec,
    build_command,
    count_cores,
    end_processes,
    find_mpi,
    new_job,
)

# With `python -u`, a call of print with two values writes four times, and ranks share the output.
_WHOLE_LINES = "import sys; sys.stdout.reconfigure(line_buffering=True)\n"


def write_script(path: Path, text: str) -> list[str]:
    """Write a script whose printed lines arrive whole; return the command that runs it."""
    path.write_text(_WHOLE_LINES + text)
    return [sys.executable, str(path)]


@dataclass
class Started:
    """Running ranks.

    Attributes:
        process: mpiexec or `tfscale run`, leader of a session of its own.
        job: Mark of all processes, see `tfscale.launcher.mpi_command`.
        output: File with what all ranks print.
    """

    process: subprocess.Popen
    job: str
    output: Path

    def end(self) -> None:
        """Kill mpiexec and every rank; harmless when they have ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        end_processes(self.job, grace_s=0.0)

    def output_tail(self, characters: int = 6000) -> str:
        """Return the end of what was printed."""
        return self.output.read_text(errors="replace")[-characters:]


def start_ranks(
    size: int, command: Sequence[str], env: Mapping[str, str] | None, output: Path
) -> Started:
    """Start `size` ranks of a command in this folder.

    Args:
        size: Number of ranks; 0 starts the command by itself, without a launcher.
        command: Program and arguments.
        env: Variables set in addition.
        output: File for what all ranks print.
    """
    words = list(command)
    if size:
        spec = LaunchSpec(
            tuple(words), size, is_root=os.geteuid() == 0, n_cores=count_cores(), bind_to=None
        )
        words = build_command(spec, find_mpi())
    return _start(words, env, output)


def start_job(
    options: Sequence[str],
    command: Sequence[str],
    env: Mapping[str, str] | None,
    output: Path,
    prefix: Sequence[str] = (),
) -> Started:
    """Start `tfscale run` with options; `Started.process` is the launcher's.

    Args:
        options: Of `tfscale run`.
        command: Program and arguments of each rank.
        env: Variables set in addition.
        output: File for what all print.
        prefix: Words before `tfscale run`.
    """
    words = [*prefix, sys.executable, "-m", "tfscale.launcher.cli", "run", *options, "--", *command]
    return _start(words, env, output)


def _start(words: Sequence[str], env: Mapping[str, str] | None, output: Path) -> Started:
    # The folder of the tests first: `tests` must be importable in the ranks as it is here.
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    job, environ = new_job({**os.environ, **QUIET, "PYTHONPATH": path, **(env or {})})
    with output.open("w") as file:
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(process, job, output)


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended.

    Attributes:
        exit_code: mpiexec's; None if it did not end in time and was killed.
        output: What all ranks printed, in the order it came.
        seconds: Duration.
    """

    exit_code: int | None
    output: str
    seconds: float


def launch_script(
    size: int,
    script_or_code: str | Sequence[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> ScriptResult:
    """Run a script on ranks of its own; meant for tests that expect it to fail.

    Args:
        size: Number of ranks; 0 starts one process without a launcher.
        script_or_code: Path of a script, or its text (more than one line or no `.py` at its
            end), or a list of path and arguments.
        timeout_s: Limit in seconds; then all ranks are killed.
        env: Variables set in addition.
    """
    words = [script_or_code] if isinstance(script_or_code, str) else list(script_or_code)
    with tempfile.TemporaryDirectory(prefix="tfscale-script-") as folder:
        if not words[0].endswith(".py") or "\n" in words[0]:
            command = write_script(Path(folder) / "script.py", words[0])
        else:
            command = [sys.executable, "-u", words[0]]
        command += words[1:]
        start = time.monotonic()
        started = start_ranks(size, command, env, Path(folder) / "output")
        try:
            code: int | None = started.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            seconds = time.monotonic() - start
            started.end()
        return ScriptResult(code, started.output_tail(100_000), seconds)
