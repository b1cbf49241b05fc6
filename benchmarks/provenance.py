"""Provenance of a measurement: machine, commit, command, load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfscale.files import sha256
from tfscale.launcher.mpi_command import find_mpi

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("tensorflow", "keras", "numpy", "mpi4py", "horovod", "tfscale")
# What a result depends on, and files that count although git does not know them.
_SOURCES = ("tfscale", "custom_ops", "recipes", "benchmarks")
_UNTRACKED = (".py", ".cc", ".h")


def describe() -> dict[str, Any]:
    """Return machine, versions, commit and command of this process, for JSON."""
    mpi = find_mpi()
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpu": _cpu(),
            "n_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "versions": {
            "python": platform.python_version(),
            "mpi": f"{mpi.kind} {mpi.version}" if mpi else None,
            **{name: _version(name) for name in _PACKAGES},
        },
        "commit": commit(),
        "command": ["python", "-m", "benchmarks", *without_output(sys.argv[1:])],
    }


def commit() -> str | None:
    """Return the commit of this checkout; after it "+" and a digest of the changes since, if any.

    Sources that git does not know are changes. None outside a checkout, or without git.
    """
    number = _git("rev-parse", "HEAD")
    changes = (_git("diff", "HEAD") or "") + _untracked() if number else ""
    return f"{number}+{sha256(changes.encode())[:8]}" if changes else number


def _untracked() -> str:
    """Return names and texts of the sources that git does not know."""
    listed = _git("ls-files", "-z", "--others", "--exclude-standard", "--", *_SOURCES) or ""
    names = [name for name in listed.split("\0") if name.endswith(_UNTRACKED)]
    return "".join(f"{name}\n{(ROOT / name).read_text(errors='replace')}" for name in names)


def without_output(words: Iterable[str]) -> list[str]:
    """Return arguments without `--output`: a path on one's machine says nothing about numbers."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--output":
            next(rest, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return kept


def load() -> float:
    """Return the number of runnable processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
