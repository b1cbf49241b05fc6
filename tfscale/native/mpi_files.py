"""Files that MPICH leaves on a host when its processes are killed.

Ranks of a host share one file in /dev/shm, about 1 MB for each, and the proxy of mpiexec writes the
host's topology to /tmp. MPICH removes both in `MPI_Finalize` and at mpiexec's normal end only.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Queues between the ranks of a host: for each rank 64 cells of 16 KiB, and their headers.
BYTES_PER_RANK = 1_060_000
_TOPOLOGIES = Path("/tmp")
_NAMES = re.compile(r"mpich_(?:shm|vci)_\w+|hydra_hwloc_xmlfile_\w+")
_PATHS = re.compile(r"/dev/shm/mpich_(?:shm|vci)_\w+|/tmp/hydra_hwloc_xmlfile_\w+")
# By which the clock may have been set while a process runs.
_CLOCK_S = 60.0


def _uses(pid: int) -> set[str]:
    """Return the files of MPICH that a process has mapped or open; none of other users'."""
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        paths |= set(_PATHS.findall(Path(f"/proc/{pid}/maps").read_text()))
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                paths |= set(_PATHS.findall(os.readlink(entry.path)))
    return paths


def used_by(pids: Iterable[int]) -> set[str]:
    """Return the paths of MPICH's files that processes of this user have mapped or open."""
    return set().union(*map(_uses, pids))


def remove(paths: Iterable[str]) -> None:
    """Remove files of this user; a process that has mapped one keeps its memory until it ends."""
    for path in paths:
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.geteuid():
                os.unlink(path)


def find_left() -> list[tuple[str, int]]:
    """Return (path, bytes) of the files that ended jobs of this user have left, by name.

    A job that starts opens its topology again and again: while a process of mpiexec runs, files
    that are younger than it may be in use. Processes of other containers are not visible here.
    """
    # The files first: those of a job that starts after this line are not among them.
    paths = (*SHARED_MEMORY.glob("mpich_*"), *_TOPOLOGIES.glob("hydra_hwloc_xmlfile_*"))
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    used = used_by(pids)
    oldest = min(filter(None, map(_start_of_mpiexec, pids)), default=float("inf"))
    left = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_ours = status.st_uid == os.geteuid() and bool(_NAMES.fullmatch(path.name))
            may_start = path.parent == _TOPOLOGIES and status.st_mtime >= oldest - _CLOCK_S
            if is_ours and not may_start and str(path) not in used:
                left.append((str(path), status.st_blocks * 512))
    return sorted(left)


def _start_of_mpiexec(pid: int) -> float | None:
    """Return when a process of mpiexec was started, in s since the epoch; None for others."""
    with contextlib.suppress(OSError, ValueError):
        # The name before it, in brackets, may hold spaces.
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        is_ours = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
        if is_ours and re.search(r"\((hydra_|mpiexec)", name):
            uptime_s = float(Path("/proc/uptime").read_text().split()[0])
            return time.time() - uptime_s + int(rest.split()[19]) / os.sysconf("SC_CLK_TCK")
    return None


def free_bytes() -> int:
    """Return the space left in /dev/shm."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize
