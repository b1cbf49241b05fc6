"""Agreement between ranks: the newest sound checkpoint, when to save, when to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.checkpoints.files import (
    DamagedError,
    Found,
    Part,
    StoredPart,
    UnreadableError,
    list_checkpoints,
    set_aside,
)
from tfscale.comm import collectives, objects, runtime
from tfscale.config import ConfigError, ExchangeError

logger = logging.getLogger("tfscale")

ROUND_S = 1.0


def name_run() -> str:
    """Return 8 hexadecimal digits, equal on all ranks. Collective."""
    own = uuid.uuid4().hex[:8] if runtime.rank() == 0 else None
    name: str = objects.broadcast_object(own, 0, name="name of a run")
    return name


def make_directory(directory: Path, run: str, is_shared: bool) -> None:
    """Make a directory on rank 0, and require that all ranks see it if they share it. Collective.

    Args:
        directory: For checkpoints.
        run: A name that no other run has.
        is_shared: All ranks write there, not only rank 0.

    Raises:
        ConfigError: It cannot be written, or is another one on some rank; on all ranks.
    """
    mark, error = directory / f".{run}", ""
    if runtime.rank() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as failure:
            error = f"rank 0: {failure}"
    error = objects.broadcast_object(error, 0, name="directory of checkpoints")
    if is_shared and not error and not os.path.exists(mark):  # which raises nothing
        error = f"rank {runtime.rank()} does not see what rank 0 wrote there"
    errors = [text for text in objects.allgather_object(error, name="see directory") if text]
    if runtime.rank() == 0:
        with contextlib.suppress(OSError):
            mark.unlink()
    if errors:
        need, way = "a directory that rank 0 can write to", "Pass another folder."
        if is_shared:
            need = "a directory that all ranks write to and read from"
            way = "Pass a folder on a shared file system, or shared=False: rank 0 writes for all."
        raise ConfigError(
            f"Checkpoints need {need}. Received: {str(directory)!r}, {errors[0]}. {way}"
        )


def newest_sound(directory: Path, is_shared: bool) -> list[Part] | None:
    """Return the parts of the newest checkpoint that is sound, or None if there never was one.

    Damaged ones that are passed over are renamed, unfinished ones are left to be deleted later.
    Collective: all ranks must call this.

    Args:
        directory: See `make_directory`.
        is_shared: Each file is checked by one rank, and each rank reads what it needs. Otherwise
            rank 0 reads all parts and sends them.

    Raises:
        ConfigError: There are some, and all are damaged, or the system does not let the directory
            or the newest be read; on all ranks.
    """
    damaged: list[tuple[Path, str]] = []
    share = (runtime.rank(), runtime.size()) if is_shared else (0, 1)
    for listed in _list_together(directory):
        found = dataclasses.replace(listed, path=directory / listed.path.name)  # as seen from here
        if not found.is_finished and not found.unreadable:
            _warn("Checkpoint %s is passed over: %s.", found.path, found.why_unfinished())
            continue
        parts: list[Part] = []
        error, unreadable = "", ""
        try:
            if is_shared or runtime.rank() == 0:
                parts = [StoredPart(found.path, manifest) for manifest in found.check(share)]
        except DamagedError as failure:
            error = str(failure)
        except UnreadableError as failure:
            unreadable = f"rank {runtime.rank()}: {failure}"
        every = objects.allgather_object((error, unreadable), name="check")
        _require_readable(found.path, [text for _, text in every if text])
        errors = [text for text, _ in every if text]
        if not errors:
            for path, _ in damaged if runtime.rank() == 0 else ():
                logger.warning("%s is renamed to %s.", path.name, set_aside(path) or "nothing")
            return parts if is_shared else _send(found, parts)
        damaged.append((found.path, errors[0]))
        _warn("Checkpoint %s is passed over: %s.", found.path, errors[0])
    if damaged:
        reasons = "; ".join(f"{path.name}: {error}" for path, error in damaged)
        raise ConfigError(
            f"A run goes on from a checkpoint that is sound. Received: {str(directory)!r} with "
            f"damaged ones only: {reasons}. Remove them, or pass another directory, to start over."
        )
    return None


def _list_together(directory: Path) -> list[Found]:
    listed: list[Found] = []
    error = ""
    if runtime.rank() == 0:
        try:
            listed = list_checkpoints(directory)
        except UnreadableError as failure:
            error = f"rank 0: {failure}"
    listed, error = objects.broadcast_object((listed, error), 0, name="checkpoints")
    _require_readable(directory, [error] if error else [])
    return listed


def _send(found: Found, parts: list[Part]) -> list[Part]:
    """Return on all ranks the parts that rank 0 reads."""
    sent: list[Part] = []
    for rank in range(found.size):
        part: Any = None
        if runtime.rank() == 0:
            try:
                part = Part(parts[rank].info, dict(parts[rank].arrays))
            except (DamagedError, UnreadableError) as failure:
                part = f"rank 0: {failure}"
        part = objects.broadcast_object(part, 0, name="part of a checkpoint")
        _require_readable(found.path, [part] if isinstance(part, str) else [])
        sent.append(part)
    return sent


def _require_readable(path: Path, errors: list[str]) -> None:
    """Refuse to begin: with an older checkpoint than the newest, steps would be lost."""
    if errors:
        raise ConfigError(
            f"All ranks must be able to read a checkpoint. Received: {str(path)!r}, "
            f"{errors[0]}. It may be sound, and nothing was changed: mend this, or move it away, "
            "then start again."
        )


def _warn(text: str, *values: object) -> None:
    if runtime.rank() == 0:
        logger.warning(text, *values)


@dataclass
class Requests:
    """Requests of some rank, after a round; before it, those of this one."""

    stops: bool = False
    has_failed: bool = False
    is_time: bool = False


class StepRounds:
    """Lets ranks ask each other at the end of a step, about once a second.

    The number of steps between two rounds follows from the slowest rank's times, which are sent
    with the requests, so it is the same on all ranks. One process asks itself in every step.
    """

    def __init__(self) -> None:
        """Begin with a round after the first step."""
        self._interval = 1
        self._n_steps = 0
        self._start = time.monotonic()

    def end_step(self, own: Requests) -> Requests:
        """Return the requests of all ranks. Collective where a round is due.

        Args:
            own: Those of this rank.

        Raises:
            ExchangeError: Communication failed.
        """
        if runtime.is_single():
            return own
        self._n_steps += 1
        if self._n_steps < self._interval:
            return Requests()
        now = time.monotonic()
        values = [own.stops, own.has_failed, own.is_time, max(now - self._start, 1e-6)]
        most = np.asarray(
            collectives.allreduce(
                np.array(values, np.float64), op=runtime.Max, name="requests for checkpoints"
            )
        )
        wanted = int(self._interval * ROUND_S / float(most[3]))
        self._interval = max(1, min(2 * self._interval, wanted))
        self._n_steps, self._start = 0, time.monotonic()
        return Requests(bool(most[0]), bool(most[1]), bool(most[2]))


def raise_together(error: str, is_shared: bool = True) -> None:
    """Raise on all ranks if some could not write its part. Collective.

    Args:
        error: Of this rank; empty if all went well.
        is_shared: Each rank writes, not only rank 0.

    Raises:
        ExchangeError: With the ranks and their errors.
    """
    every = objects.allgather_object(error, name="parts of a checkpoint")
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text]
    if texts:
        need = "Each rank must write its part" if is_shared else "Rank 0 must write all parts"
        raise ExchangeError(
            f"{need} of a checkpoint. Received: {'; '.join(texts)}. The checkpoints before are "
            "still there. Make room, then start the job again."
        )


def all_are_at(place: str) -> bool:
    """Return whether all ranks have come to the same place of `fit` after a step. Collective."""
    return len(set(objects.allgather_object(place, name="place in fit"))) == 1


def agree_on_end(is_new: bool, stops: bool, is_broken: bool = False) -> tuple[bool, bool]:
    """Return whether there is something to save, and whether some rank was asked to stop.

    There is where some rank has steps that are not saved, and no rank's model is broken: it would
    take the place of a sound one. Collective: all ranks must call this.
    """
    every = objects.allgather_object((is_new, stops, is_broken), name="end of training")
    is_new, stops = any(new for new, _, _ in every), any(stop for _, stop, _ in every)
    broken = [rank for rank, (_, _, is_so) in enumerate(every) if is_so]
    if is_new and broken:
        _warn("The last steps are not saved: weights of ranks %s are not finite.", broken)
    return is_new and not broken, stops
