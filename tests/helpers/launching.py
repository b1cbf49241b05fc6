"""Scripts and jobs that tests run."""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.environment import QUIET
from tfscale.comm.process import discover
from tfscale.testing.processes import Finished, Started, run_command, start

# With `python -u` or PYTHONUNBUFFERED, print writes each value and each line's end apart, and ranks
# share the output.
WHOLE_LINES = "import sys; sys.stdout.reconfigure(line_buffering=True, write_through=False)\n"


def job_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of jobs."""
    # The folder of the tests first: `tests` must be importable in the ranks as it is here.
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    return {**QUIET, "PYTHONPATH": path, **(env or {})}


def write_script(path: Path, text: str) -> list[str]:
    """Write a script whose printed lines arrive whole; return the command that runs it."""
    path.write_text(WHOLE_LINES + text)
    return [sys.executable, str(path)]


def meet(script: str) -> None:
    """Wait in a script until all its ranks have come this far, as their imports may end apart.

    Short limits of waiting count from `tfscale.init` on.
    """
    name = f"attempt-{os.environ.get('TFSCALE_RESTART')}"
    place = discover(os.environ)
    assert place is not None
    Path(script).with_name(f"{name}-{place.rank}").touch()
    # A rank that is gone is none to wait for: the launcher ends the others.
    while len(list(Path(script).parent.glob(f"{name}-*"))) < place.size:
        time.sleep(0.01)


def start_job(
    options: Sequence[str],
    command: Sequence[str],
    env: Mapping[str, str] | None,
    output: Path,
    prefix: Sequence[str] = (),
) -> Started:
    """Start `tfscale run` with options; `Started.process` is the launcher's."""
    return start([*prefix, *job_words(options, command)], output, env=job_variables(env))


def job_words(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return `tfscale run` with options for a command."""
    return [sys.executable, "-m", "tfscale.launcher.cli", "run", *options, "--", *command]


def launch_script(
    size: int,
    script_or_code: str | Sequence[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run a script, or its text, on ranks of its own; size 0 starts it without a launcher."""
    words = [script_or_code] if isinstance(script_or_code, str) else list(script_or_code)
    with tempfile.TemporaryDirectory(prefix="tfscale-script-") as folder:
        if not words[0].endswith(".py") or "\n" in words[0]:
            command = write_script(Path(folder) / "script.py", words[0])
        else:
            command = [sys.executable, "-u", words[0]]
        return run_command([*command, *words[1:]], timeout_s, size=size, env=job_variables(env))


def run_in_folder(
    words: Sequence[str], folder: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> Finished:
    """Run a command in a folder; what it writes to standard error is kept apart."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = job_variables(env)
    return run_command(words, timeout_s, env=environ, folder=folder, errors_apart=True)
