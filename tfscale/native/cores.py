"""The number of cores that this process may use: its affinity and the CPU quotas of its cgroups.

A container with `--cpus=2` on a host of 64 cores sees all of them, and the kernel stops its threads
for the rest of each period (0.1 s) once together they have run for 2 periods.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    The part of a core that a quota ends with counts as one.
    """
    usable = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(usable, find_quota())))


def share_of_cores(n_cores: int, n_ranks: int) -> int:
    """Return a rank's cores, at least 1: `n_cores` of its affinity, but its part of a quota.

    The `n_ranks` ranks of a host are taken to be in the cgroup that has the quota.
    """
    quota = find_quota()
    return n_cores if math.isinf(quota) else max(1, min(n_cores, math.ceil(quota) // n_ranks))


def find_quota(process: Path = Path("/proc/self"), root: Path = Path("/")) -> float:
    """Return the least CPU quota of this process's cgroup and those around it, in cores.

    Infinity without a quota, or where none can be read. cgroup v1 and v2 may be mounted together.

    Args:
        process: Folder of the process in /proc.
        root: Folder that stands for "/" in the paths of mounts.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        for folder, top in _folders(process, root):
            # A limit holds for all groups within; those above the mount are not visible.
            inner = folder.relative_to(top).parts
            quotas += [_read_quota(top.joinpath(*inner[:n])) for n in range(len(inner) + 1)]
    return min(quotas)


def _folders(process: Path, root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of each cgroup that can have a quota, and that of its mount."""
    groups: dict[str, str] = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            groups["cgroup"] = path
    for line in (process / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, mounted, target, *_ = map(_unescape, before.split())
        kind, _, options = after.split()[:3]
        if kind not in groups or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        top = root / target.lstrip("/")
        inner = PurePosixPath(groups[kind])
        # In a container without a namespace of cgroups the mount shows the container's group as
        # its top; of a group outside of the mount only the top is visible.
        inside = inner.is_relative_to(mounted) and ".." not in inner.parts
        folder = top / inner.relative_to(mounted) if inside else top
        yield (folder if folder.is_dir() else top), top


def _unescape(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _read_quota(folder: Path) -> float:
    """Return the quota of one group, of either version of cgroups."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0:
                return int(quota) / int(period)
    return math.inf
