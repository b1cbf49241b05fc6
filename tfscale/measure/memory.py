"""Memory check before a batch grows: what training took so far against what is left."""

import contextlib
import logging
from pathlib import Path

import tensorflow as tf

from tfscale.comm import runtime

logger = logging.getLogger("tfscale")


class MemoryGuard:
    """Extrapolates the memory of training steps to a larger local batch, on the safe side.

    What steps take is counted from before the first one, and by peaks of the process: steps below
    an earlier peak, of validation for example, leave the estimate as it was.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        self._peak = self._bytes_per_sample = 0.0

    def begin_epoch(self) -> None:
        """Note what is used before the first step of an epoch."""
        now, self._peak = _used_bytes()
        self._before = now if self._before is None else self._before

    def end_epoch(self, local_batch: int) -> None:
        """Note what the steps of an epoch took, before anything else takes more."""
        _, peak = _used_bytes()
        if peak > self._peak or not self._bytes_per_sample:
            self._bytes_per_sample = max(peak - (self._before or 0), 0) / local_batch

    def fits(self, local_batch: int, larger: int) -> bool:
        """Return whether a larger local batch is expected to fit; True where memory is unknown."""
        free, needed = _free_bytes(), int(self._bytes_per_sample * (larger - local_batch))
        if needed <= max(free, 0):
            return True
        logger.warning(
            f"A local batch of {larger} is expected to need {needed >> 20} MiB more than one of "
            f"{local_batch}; {int(free) >> 20} MiB are left for this rank."
        )
        return False


def _used_bytes() -> tuple[int, int]:
    """Return the memory of this process, or of its GPU: now, and at most so far."""
    if tf.config.list_logical_devices("GPU"):
        found = tf.config.experimental.get_memory_info("GPU:0")
        return found["current"], found["peak"]
    status = _numbers("/proc/self/status")
    return status.get("VmRSS:", 0) << 10, status.get("VmHWM:", 0) << 10


def _free_bytes() -> float:
    """Return what is left for this rank, on its GPU or its share of the host."""
    if tf.config.list_logical_devices("GPU"):
        from tensorflow.python.client import device_lib

        limits = {d.name: d.memory_limit for d in device_lib.list_local_devices()}
        return limits["/device:GPU:0"] - _used_bytes()[1]
    free = _numbers("/proc/meminfo").get("MemAvailable:", float("inf")) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max", or no control group of version 2
        left = int(Path("/sys/fs/cgroup/memory.max").read_text())
        left -= int(Path("/sys/fs/cgroup/memory.current").read_text())
        cache = _numbers("/sys/fs/cgroup/memory.stat")  # counted as used, but can be had
        free = min(free, left + cache.get("active_file", 0) + cache.get("inactive_file", 0))
    return free / max(1, runtime.local_size())


def _numbers(path: str) -> dict[str, int]:
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if words[1:2] and words[1].isdigit()}
