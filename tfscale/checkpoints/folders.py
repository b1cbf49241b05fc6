"""The checkpoints of a run in their directory: which there are, which are kept."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfscale.checkpoints.parts import (
    MANIFEST,
    DamagedError,
    UnreadableError,
    check_file,
    check_size,
    read_manifest,
    reading,
)

_NAME = re.compile(r"step-(\d{10})-([0-9a-f]{8})")
_PART = re.compile(rf"rank-(\d{{5}}){re.escape(MANIFEST)}")
_DAMAGED = "damaged-"


@dataclass(frozen=True)
class Found:
    """A checkpoint in its directory.

    Attributes:
        path: Its folder.
        step: Training steps before it, from the beginning of the run.
        size: Number of ranks that wrote it; 0 if no part is readable.
        missing: Ranks whose parts are not finished.
        unreadable: Why its folder could not be listed; empty if it was.
    """

    path: Path
    step: int
    size: int
    missing: tuple[int, ...]
    unreadable: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether all parts are there; `check` tells whether they are sound."""
        return self.size > 0 and not self.missing

    def check(self, share: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
        """Compare all manifests, and some of the files, with their checksums.

        Args:
            share: (i, n): check the i-th of n shares of the files.

        Returns:
            The manifests, in rank order.

        Raises:
            DamagedError: Something is missing, cut or changed, or parts do not belong together.
            UnreadableError: The system does not let the folder or a file be read.
        """
        if self.unreadable:
            raise UnreadableError(self.unreadable)
        if not self.is_finished:
            raise DamagedError(self.why_unfinished())
        manifests = [read_manifest(self.path, rank) for rank in range(self.size)]
        keys = ("run", "step", "size")
        for rank, manifest in enumerate(manifests):
            if any(manifest["info"].get(k) != manifests[0]["info"].get(k) for k in keys):
                raise DamagedError(f"the parts of ranks 0 and {rank} do not belong together")
        for manifest in manifests:
            check_size(self.path, manifest)
        for manifest in manifests[share[0] :: share[1]]:
            check_file(self.path, manifest)
        return manifests

    def why_unfinished(self) -> str:
        """Say what is missing."""
        if not self.size:
            return "no rank has finished its part"
        shown = ", ".join(map(str, self.missing[:8]))
        more = f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
        return f"the parts of ranks {shown}{more} of {self.size} are not finished"


def folder_name(step: int, run: str) -> str:
    """Return the name of a checkpoint's folder.

    Args:
        step: Training steps before it.
        run: 8 hexadecimal digits, others for each start of the job: what a run left behind
            unfinished is never completed by parts of another one.
    """
    return f"step-{step:010d}-{run}"


def list_checkpoints(directory: str | Path) -> list[Found]:
    """Return the checkpoints in a directory, newest first, unfinished ones included.

    Args:
        directory: What `tfscale.callbacks.Checkpoint` was given; need not exist.

    Raises:
        UnreadableError: The system does not let it be listed.
    """
    found = []
    for name in _names_in(Path(directory)):
        path, match = Path(directory) / name, _NAME.fullmatch(name)
        status = _status_of(path) if match else None
        if match and status and stat.S_ISDIR(status.st_mode):
            found.append((int(match[1]), status.st_mtime, path))
    return [_look(path, step) for step, _, path in sorted(found, reverse=True)]


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest finished checkpoints, and what is unfinished and older.

    What the system does not let be read or deleted stays until the next time. Links are left
    alone, and not counted: their targets are not the run's.

    Args:
        directory: Where they are.
        keep: How many stay.
    """
    n_finished = 0
    with contextlib.suppress(UnreadableError, OSError):  # there will be a next time
        for found in list_checkpoints(directory):
            if found.path.is_symlink():
                continue
            is_old = n_finished >= keep or (n_finished and not found.is_finished)
            if is_old and not found.unreadable:  # which may be sound
                _delete(found.path)
            n_finished += found.is_finished


def set_aside(found: Found) -> Path:
    """Rename a damaged checkpoint, so that it is not looked at again; return its new path."""
    new = found.path.with_name(_DAMAGED + found.path.name)
    found.path.replace(new)
    return new


def _delete(path: Path) -> None:
    """Delete manifests first, so that what is left of a checkpoint is not taken for one."""
    with contextlib.suppress(OSError, UnreadableError):  # there will be a next time
        for name in _names_in(path):
            if name.endswith(MANIFEST):
                (path / name).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _names_in(folder: Path) -> list[str]:
    """Return what a folder holds; nothing if it is not there. `glob` hides all other errors, too.

    Raises:
        UnreadableError: The system does not let it be listed.
    """
    with contextlib.suppress(DamagedError), reading(folder):  # there is no such folder
        return os.listdir(folder)
    return []


def _status_of(path: Path) -> os.stat_result | None:
    with contextlib.suppress(DamagedError), reading(path):  # it is gone since it was listed
        return path.stat()
    return None


def _look(path: Path, step: int) -> Found:
    try:
        names = _names_in(path)
    except UnreadableError as error:
        return Found(path, step, 0, (), str(error))
    ranks = sorted(int(match[1]) for match in map(_PART.fullmatch, names) if match)
    for rank in ranks:
        try:
            size = int(read_manifest(path, rank)["info"]["size"])
        except (DamagedError, UnreadableError):
            continue
        missing = tuple(r for r in range(size) if r not in set(ranks))
        return Found(path, step, size, missing)
    # Manifests that all are damaged are no reason to start afresh: `check` says what is wrong.
    return Found(path, step, len(ranks), ())
