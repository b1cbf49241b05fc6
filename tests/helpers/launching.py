"""Start ranks for a test, and end them for sure."""

import dataclasses
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
    process: subprocess.Popen
    job: str
    output: Path

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        end_processes(self.job, grace_s=0.0)

    def output_tail(self, characters: int = 6000) -> str:
        # As bytes: progress bars contain carriage returns, which read_text makes new lines of.
        return self.output.read_bytes().decode(errors="replace")[-characters:]


def start_ranks(
    size: int, command: Sequence[str], env: Mapping[str, str] | None, output: Path
) -> Started:
    """Start `size` ranks of a command in this folder; 0 starts it without a launcher."""
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
    """Start `tfscale run` with options; `Started.process` is the launcher's."""
    return _start([*prefix, *job_words(options, command)], env, output)


def job_words(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return `tfscale run` with options for a command."""
    return [sys.executable, "-m", "tfscale.launcher.cli", "run", *options, "--", *command]


def _start(
    words: Sequence[str],
    env: Mapping[str, str] | None,
    output: Path,
    folder: Path | None = None,
    errors: Path | None = None,
) -> Started:
    # The folder of the tests first: `tests` must be importable in the ranks as it is here.
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    job, environ = new_job({**os.environ, **QUIET, "PYTHONPATH": path, **(env or {})})
    with output.open("w") as file, (errors or Path(os.devnull)).open("w") as error_file:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=error_file if errors else subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(process, job, output)


@dataclass(frozen=True)
class ScriptResult:
    exit_code: int | None
    output: str
    seconds: float
    errors: str = ""


def launch_script(
    size: int,
    script_or_code: str | Sequence[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> ScriptResult:
    """Run a script, or its text, on ranks of its own; size 0 starts it without a launcher."""
    words = [script_or_code] if isinstance(script_or_code, str) else list(script_or_code)
    with tempfile.TemporaryDirectory(prefix="tfscale-script-") as folder:
        if not words[0].endswith(".py") or "\n" in words[0]:
            command = write_script(Path(folder) / "script.py", words[0])
        else:
            command = [sys.executable, "-u", words[0]]
        command += words[1:]
        return _wait(start_ranks(size, command, env, Path(folder) / "output"), timeout_s)


def run_in_folder(
    words: Sequence[str], folder: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> ScriptResult:
    """Run a command in a folder; what it writes to standard error is kept apart."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tfscale-script-") as name:
        output, errors = Path(name) / "output", Path(name) / "errors"
        result = _wait(_start(words, env, output, folder, errors), timeout_s)
        return dataclasses.replace(result, errors=errors.read_text(errors="replace"))


def _wait(started: Started, timeout_s: float) -> ScriptResult:
    start = time.monotonic()
    try:
        code: int | None = started.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        seconds = time.monotonic() - start
        started.end()
    return ScriptResult(code, started.output_tail(100_000), seconds)
