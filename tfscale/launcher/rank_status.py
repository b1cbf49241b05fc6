"""What a rank says of itself while it lives, for the process that looks after it.

`rank_process` makes a small file in memory for each rank; the rank and its communication thread
write into it, and it is read when the rank has ended, however it did. Nothing stands on a disk.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass

from tfscale import config
from tfscale.launcher.launch import STATUS_VARIABLE

# States of a rank. "": tfscale.init has not returned. WAITING: it has not, for want of others.
# ALONE: a job of its own, which may end as it likes. JOINED: the others count on it. TOLD: it ends
# because communication failed, which another rank may be the cause of. FINISHED: all have left the
# job together. RAISED: they have, while an exception was on its way.
WAITING = "waiting"
ALONE = "alone"
JOINED = "joined"
TOLD = "told"
FINISHED = "finished"
RAISED = "raised"

# Where things stand in the file; custom_ops/comm/status_file.h writes the place.
_STATE_BYTES = 64
_PLACE_BYTES = 448
_ERROR_BYTES = 1 << 16


@dataclass(frozen=True)
class RankStatus:
    """What a rank left.

    Attributes:
        state: One of those above.
        place: The last collective that was finished, and how often it had run; may be empty.
        error: Traceback of the exception that ended the rank; may be empty.
    """

    state: str
    place: str
    error: str


def create() -> int:
    """Return the descriptor of a new, empty file in memory."""
    descriptor = os.memfd_create("tfscale-rank")
    os.truncate(descriptor, _STATE_BYTES + _PLACE_BYTES)
    return descriptor


def path_of(descriptor: int) -> str:
    """Return a path under which other processes of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def read(descriptor: int) -> RankStatus:
    """Return what a rank left in its file."""

    def text(n_bytes: int, offset: int) -> str:
        return os.pread(descriptor, n_bytes, offset).partition(b"\0")[0].decode(errors="replace")

    return RankStatus(
        text(_STATE_BYTES, 0),
        text(_PLACE_BYTES, _STATE_BYTES),
        text(_ERROR_BYTES, _STATE_BYTES + _PLACE_BYTES),
    )


@functools.cache
def file_path() -> str:
    """Return the path of this rank's file, or "" where nobody looks after it.

    It is taken out of the environment: what this process starts is no rank.
    """
    return config.take(STATUS_VARIABLE)


def is_watched() -> bool:
    """Return whether a process looks after this rank: then it ends the others if need be."""
    return bool(file_path())


def write_state(state: str) -> None:
    """Tell in which state this rank is; does nothing where nobody looks after it."""
    _write(state.encode().ljust(_STATE_BYTES, b"\0"), 0)


def write_error(text: str) -> None:
    """Leave the text that says why this rank ends; the first one counts."""
    offset = _STATE_BYTES + _PLACE_BYTES
    path = file_path()
    with contextlib.suppress(OSError):
        if path and os.path.getsize(path) <= offset:
            _write(text.encode()[-_ERROR_BYTES:], offset)


def _write(data: bytes, offset: int) -> None:
    path = file_path()
    if not path:
        return
    # The one who looks may have been killed; this rank ends in a moment then.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)
