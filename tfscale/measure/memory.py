"""Whether a larger batch is expected to fit into memory, judged from what training used so far.

Nothing is tried out: a trial that fails may take the process with it.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from tfscale.comm import runtime

logger = logging.getLogger("tfscale")
_PAGES_OF_FILES = ("active_file", "inactive_file")


class MemoryGuard:
    """Compares the memory that training has taken with what is left.

    Memory beyond that of before the first step is taken to grow with the local batch. Part of it
    does not (gradients, code, buffers), so the estimate is on the safe side.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        self._most = 0

    def begin_epoch(self) -> None:
        """Forget what others, validation for one, have used; note what is used before a run."""
        _reset_peak()
        if self._before is None:
            self._before = used_bytes()

    def end_epoch(self) -> None:
        """Note what the training steps of an epoch used, before anything else uses more."""
        self._most = used_bytes()

    def fits(self, local_batch: int, next_local_batch: int) -> bool:
        """Tell whether a larger batch is expected to fit on this rank.

        Args:
            local_batch: Samples per step on this rank so far.
            next_local_batch: Samples per step to be judged.

        Returns:
            Whether it does; True where the system does not say what is free.
        """
        free = free_bytes()
        if free is None or next_local_batch <= local_batch:
            return True
        taken = max((self._most or used_bytes()) - (self._before or 0), 0)
        needed = taken * (next_local_batch - local_batch) // local_batch
        share = free // max(1, runtime.local_size())
        if needed <= share:
            return True
        logger.warning(
            "A local batch of %d is expected to need %d MiB more than one of %d; %d MiB are left "
            "for this rank.", next_local_batch, needed >> 20, local_batch, share >> 20,
        )  # fmt: skip
        return False


def used_bytes() -> int:
    """Return the largest memory of this process, or of its GPU, since the last reset."""
    device = _gpu()
    if device is not None:
        import tensorflow as tf

        return int(tf.config.experimental.get_memory_info(device)["peak"])
    return _field("/proc/self/status", "VmHWM:") or 0


def free_bytes() -> int | None:
    """Return the bytes that are left, on the GPU or on the host; None if nobody says."""
    device = _gpu()
    if device is not None:
        from tensorflow.python.client import device_lib

        limits = {d.name: d.memory_limit for d in device_lib.list_local_devices()}
        limit = limits.get(f"/device:{device}")
        # The share of this rank: what others use is taken off the limit by TensorFlow.
        return None if limit is None else (limit - used_bytes()) * max(1, runtime.local_size())
    left = [_field("/proc/meminfo", "MemAvailable:"), _left_in_group()]
    return min((n for n in left if n is not None), default=None)


def _gpu() -> str | None:
    import tensorflow as tf

    return "GPU:0" if tf.config.list_logical_devices("GPU") else None


def _reset_peak() -> None:
    device = _gpu()
    if device is not None:
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(device)
        return
    # Linux forgets the peak of a process that writes 5 here; elsewhere the peak stays.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _field(path: str, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _left_in_group() -> int | None:
    """Return what a container's limit leaves (control groups, version 2)."""
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        return limit - used + _pages_of_files(folder / "memory.stat")
    return None


def _pages_of_files(path: Path) -> int:
    """Return the bytes that count as used, and that whoever needs memory gets."""
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split() for line in path.read_text().splitlines()]
        return sum(int(size) for name, size in lines if name in _PAGES_OF_FILES)
    return 0
