"""Cost, distance, noise scale and memory of an epoch, averaged over the ranks."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks.metric_average import mean
from tfscale.checkpoints.variables import distinct
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.data.slices import count_active
from tfscale.internals.trace import memory_limit
from tfscale.measure.growth import Measures, noise_scale
from tfscale.optimizer.gradient_norms import GradientNorms

logger = logging.getLogger("tfscale")


@dataclass(frozen=True)
class EpochBatch:
    """The batch size of an epoch, and its division among the ranks."""

    size: int  # samples over all ranks
    larger: int | None  # the next larger size, if there is one
    has_surplus: bool  # some ranks may have no samples of their own

    @property
    def active(self) -> int:
        """Ranks that share a batch."""
        return count_active(self.size, runtime.size()) if self.has_surplus else runtime.size()

    @property
    def local(self) -> int:
        """Samples per active rank."""
        return self.size // self.active


class EpochMeasures:
    """Collects cost, distance, noise scale and memory, and averages them over the ranks."""

    def __init__(self, has_noise_scale: bool) -> None:
        self._norms = GradientNorms() if has_noise_scale else None
        self.start()

    def watch(self, model: keras.Model) -> None:
        """Let the optimizer of a model measure gradient norms, if they are needed."""
        if self._norms is not None:
            self._norms.watch(model)

    def start(self) -> None:
        """Begin a run."""
        self._guard = MemoryGuard()
        self._origin: list[np.ndarray] | None = None
        self._first_cost = math.nan  # this rank's
        self.forget_norms()

    def forget_norms(self) -> None:
        """Leave out the gradient norms of the steps so far."""
        if self._norms is not None:
            self._norms.reset()

    def begin_batch(self, model: keras.Model, is_first: bool) -> None:
        """Record the memory before an epoch's first batch, and the parameters before the run's."""
        if is_first:
            self._guard.begin_epoch()
        if self._origin is None:
            self._origin = [np.array(v.numpy()) for v in distinct(model.trainable_variables)]

    def end_batch(self, logs: dict[str, Any] | None) -> None:
        """Keep the loss of the run's first batch."""
        if math.isnan(self._first_cost):
            self._first_cost = _loss(logs)

    def end_steps(self, batch: EpochBatch) -> None:
        """Record the memory of an epoch's steps, before validation takes more."""
        self._guard.end_epoch(batch.local)

    def end_epoch(
        self, model: keras.Model, logs: dict[str, Any] | None, batch: EpochBatch
    ) -> Measures:
        """Return the measures of the epoch, averaged over the ranks. Collective."""
        larger = replace(batch, size=batch.larger).local if batch.larger else None
        measures: dict[str, Any] = {
            "first": self._first_cost,
            "cost": _loss(logs),
            "distance": self._distance(model),
            "fits": larger is None or self._guard.fits(batch.local, larger),
            "norms": self._norms.values() if self._norms is not None else None,
        }
        self.forget_norms()
        measures_by_rank = (
            objects.allgather_object(measures, name="measures")
            if runtime.size() > 1
            else [measures]
        )
        norms = [e["norms"] for e in measures_by_rank]
        squares, steps = norms[0][1:] if norms[0] else (math.nan, 1)
        return Measures(
            first_cost=mean([e["first"] for e in measures_by_rank]),
            cost=mean([e["cost"] for e in measures_by_rank]),
            distance=mean([e["distance"] for e in measures_by_rank]),
            noise_scale=math.nan if self._norms is None else _noise_of(norms, batch),
            gradient_norm=math.sqrt(squares / steps) if steps else math.nan,
            fits=all(e["fits"] for e in measures_by_rank),
        )

    def state(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the arguments for `restore`."""
        norms = self._norms.values() if self._norms is not None else None
        return {"first_cost": self._first_cost, "norms": norms}, list(self._origin or [])

    @staticmethod
    def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Combine the states of all ranks into one for a job of another size."""
        # Norms from different numbers of ranks cannot be compared: those of later steps count.
        return {"first_cost": mean([state["first_cost"] for state in states]), "norms": None}

    def restore(self, state: dict[str, Any], origin: list[np.ndarray]) -> None:
        """Resume from `state`."""
        self._first_cost = state["first_cost"]
        self._origin = list(origin) or None
        if self._norms is not None and state.get("norms") is not None:
            self._norms.restore(state["norms"])

    def _distance(self, model: keras.Model) -> float:
        pairs = zip(distinct(model.trainable_variables), self._origin or [], strict=False)
        moves = (v.numpy().astype(np.float64) - origin for v, origin in pairs)
        return math.sqrt(math.fsum(float(np.vdot(move, move)) for move in moves))


def _loss(logs: dict[str, Any] | None) -> float:
    if logs is None or "loss" not in logs:
        raise ConfigError(
            f"logs must hold the training loss. Received: logs={sorted(logs or {})}. Let "
            "train_step return 'loss'."
        )
    return float(logs["loss"])


def _noise_of(norms: list[list[float]], batch: EpochBatch) -> float:
    """Return the noise scale from the norms that each rank has summed over the epoch."""
    steps = norms[0][2]
    if batch.active < 2 or not steps:
        return math.nan
    # Active ranks are weighted with size / active, the others with 0.
    size = len(norms)
    local = math.fsum(n[0] for n in norms) * batch.active / size**2 / steps
    return noise_scale(local, batch.local, norms[0][1] / steps, batch.size)


# Memory: used by training so far, and left


class MemoryGuard:
    """Extrapolates the memory of training steps to a larger local batch, on the safe side.

    The memory of steps is the peak of the process minus its memory before the first step. Steps
    below an earlier peak, of validation for example, do not change the estimate.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        self._peak = self._bytes_per_sample = 0.0

    def begin_epoch(self) -> None:
        """Record the memory in use before the first step of an epoch."""
        now, self._peak = _used_bytes()
        self._before = now if self._before is None else self._before

    def end_epoch(self, local_batch: int) -> None:
        """Record the memory that the steps of an epoch took, before anything else takes more."""
        _, peak = _used_bytes()
        if peak > self._peak or not self._bytes_per_sample:
            self._bytes_per_sample = max(peak - (self._before or 0), 0) / local_batch

    def fits(self, local_batch: int, larger: int) -> bool:
        """Return whether a larger local batch is expected to fit; True where memory is unknown."""
        if larger <= self.largest(local_batch):
            return True
        needed = int(self._bytes_per_sample * (larger - local_batch))
        logger.warning(
            f"A local batch of {larger} is expected to need {needed >> 20} MiB more than one of "
            f"{local_batch}; {int(_free_bytes()) >> 20} MiB are left for this rank."
        )
        return False

    def largest(self, local_batch: int) -> float:
        """Return the largest local batch that is expected to fit; infinity if unknown."""
        if not self._bytes_per_sample:
            return math.inf
        return local_batch + max(_free_bytes(), 0.0) / self._bytes_per_sample


def _used_bytes() -> tuple[int, int]:
    """Return the memory of this process, or of its GPU, in bytes: now, and at its peak."""
    if tf.config.list_logical_devices("GPU"):
        memory = tf.config.experimental.get_memory_info("GPU:0")
        return memory["current"], memory["peak"]
    status = _numbers("/proc/self/status")
    return status.get("VmRSS:", 0) << 10, status.get("VmHWM:", 0) << 10


def _free_bytes() -> float:
    """Return the memory left for this rank, on its GPU or as its share of the host."""
    if tf.config.list_logical_devices("GPU"):
        return memory_limit("/device:GPU:0") - _used_bytes()[1]
    free = _numbers("/proc/meminfo").get("MemAvailable:", float("inf")) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max", or no control group of version 2
        left = int(Path("/sys/fs/cgroup/memory.max").read_text())
        left -= int(Path("/sys/fs/cgroup/memory.current").read_text())
        cache = _numbers("/sys/fs/cgroup/memory.stat")  # counted as used, but can be reclaimed
        free = min(free, left + cache.get("active_file", 0) + cache.get("inactive_file", 0))
    return free / max(1, runtime.local_size())


def _numbers(path: str) -> dict[str, int]:
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if words[1:2] and words[1].isdigit()}
