"""Files that MPICH leaves on a host when its processes are killed.

Ranks of a host share one file in /dev/shm, about 1 MB for each, and the proxy of mpiexec writes the
host's topology to /tmp. MPICH removes both in `MPI_Finalize` and at mpiexec's normal end only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Queues between the ranks of a host: for each rank 64 cells of 16 KiB, and their headers.
BYTES_PER_RANK = 1_060_000
_NAMES = re.compile(r"/dev/shm/mpich_(?:shm|vci)_\w+|/tmp/hydra_hwloc_xmlfile_\w+")


def _uses(pid: int) -> set[str]:
    """Return the files of MPICH that a process has mapped or open; none of other users'."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found |= set(_NAMES.findall(Path(f"/proc/{pid}/maps").read_text()))
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found |= set(_NAMES.findall(os.readlink(entry.path)))
    return found


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
    """Return (path, bytes) of this user's files that no process on this host uses, by name."""
    used = used_by(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    left = []
    for path in (*SHARED_MEMORY.glob("mpich_*"), *Path("/tmp").glob("hydra_hwloc_xmlfile_*")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and _NAMES.fullmatch(str(path)):
                left += [(str(path), status.st_blocks * 512)] if str(path) not in used else []
    return sorted(left)


def free_bytes() -> int:
    """Return the space left in /dev/shm."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize
