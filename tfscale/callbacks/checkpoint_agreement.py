"""What ranks agree on for checkpoints: which one is read, and, now and then, what to do next."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfscale.checkpoints.folders import Found, list_checkpoints, set_aside
from tfscale.checkpoints.parts import DamagedError, UnreadableError
from tfscale.checkpoints.reader import Reader
from tfscale.comm import collectives, objects, runtime
from tfscale.config import ConfigError, ExchangeError

logger = logging.getLogger("tfscale")

ROUND_S = 1.0


@dataclass
class Wishes:
    """What some rank wants, after a round; before it, what this one wants."""

    stops: bool = False
    has_failed: bool = False
    is_time: bool = False


class StepRounds:
    """Lets ranks ask each other at the end of a step, about once a second.

    How many steps lie between two rounds follows from the slowest rank's times, which travel with
    them, so it is the same on all ranks. One process asks nobody, in every step.
    """

    def __init__(self) -> None:
        """Begin with a round after the first step."""
        self._interval = 1
        self._n_steps = 0
        self._start = time.monotonic()

    def end_step(self, own: Wishes) -> Wishes:
        """Return what some rank wants. Collective where a round is due.

        Args:
            own: What this rank wants.

        Raises:
            ExchangeError: Communication failed.
        """
        if runtime.is_single():
            return own
        self._n_steps += 1
        if self._n_steps < self._interval:
            return Wishes()
        now = time.monotonic()
        values = [own.stops, own.has_failed, own.is_time, max(now - self._start, 1e-6)]
        most = np.asarray(
            collectives.allreduce(
                np.array(values, np.float64), op=runtime.Max, name="wishes for checkpoints"
            )
        )
        wanted = int(self._interval * ROUND_S / float(most[3]))
        self._interval = max(1, min(2 * self._interval, wanted))
        self._n_steps, self._start = 0, time.monotonic()
        return Wishes(bool(most[0]), bool(most[1]), bool(most[2]))


def name_run() -> str:
    """Return 8 hexadecimal digits, equal on all ranks. Collective."""
    own = uuid.uuid4().hex[:8] if runtime.rank() == 0 else None
    name: str = objects.broadcast_object(own, 0, name="name of a run")
    return name


def require_shared(directory: Path, run: str) -> None:
    """Make a directory on rank 0, and require that all ranks see it. Collective.

    Args:
        directory: For checkpoints.
        run: A name that no other run has.

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
    if not error and not os.path.exists(mark):  # which raises nothing on one rank alone
        error = f"rank {runtime.rank()} does not see what rank 0 wrote there"
    errors = [text for text in objects.allgather_object(error, name="see directory") if text]
    if runtime.rank() == 0:
        with contextlib.suppress(OSError):
            mark.unlink()
    if errors:
        raise ConfigError(
            "Checkpoints need a directory that all ranks write to and read from. Received: "
            f"{str(directory)!r}, {errors[0]}. Pass a folder on a shared file system."
        )


def newest_readable(directory: Path) -> Reader | None:
    """Return the newest checkpoint that all ranks can read, or None if there never was one.

    Damaged ones that are passed over are renamed, unfinished ones are left to be deleted later.
    Collective: all ranks must call this. Each file is checked by one rank.

    Raises:
        ConfigError: There are some, and all are damaged, or the system does not let the directory
            or the newest be read; on all ranks.
    """
    damaged: list[tuple[Found, str]] = []
    for listed in _list_together(directory):
        found = dataclasses.replace(listed, path=directory / listed.path.name)  # as seen from here
        if not found.is_finished and not found.unreadable:
            _warn("Checkpoint %s is passed over: %s.", found.path, found.why_unfinished())
            continue
        reader, error, unreadable = None, "", ""
        try:
            reader = Reader(found.path, found.check((runtime.rank(), runtime.size())))
        except DamagedError as failure:
            error = str(failure)
        except UnreadableError as failure:
            unreadable = f"rank {runtime.rank()}: {failure}"
        every = objects.allgather_object((error, unreadable), name="check")
        _require_readable(found.path, [text for _, text in every if text])
        errors = [text for text, _ in every if text]
        if not errors:
            _pass_over(damaged)
            return reader
        damaged.append((found, errors[0]))
        _warn("Checkpoint %s is passed over: %s.", found.path, errors[0])
    if damaged:
        reasons = "; ".join(f"{found.path.name}: {error}" for found, error in damaged)
        raise ConfigError(
            f"A run goes on from a checkpoint that is sound. Received: {str(directory)!r} with "
            f"damaged ones only: {reasons}. Remove them, or pass another directory, to start "
            "afresh."
        )
    return None


def raise_together(error: str, what: str) -> None:
    """Raise on all ranks what went wrong on some. Collective.

    Args:
        error: Of this rank; empty if all went well.
        what: What was done, for the message.

    Raises:
        ExchangeError: With the ranks and their errors.
    """
    every = objects.allgather_object(error, name=what)
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text]
    if texts:
        raise ExchangeError(
            f"Each rank must write its part of a checkpoint. Received: {'; '.join(texts)}. The "
            "checkpoints before are still there. Make room, then start the job again."
        )


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


def _require_readable(path: Path, errors: list[str]) -> None:
    """Go on from no older checkpoint because the newest cannot be read now: steps would be lost."""
    if errors:
        raise ConfigError(
            f"All ranks must be able to read a checkpoint. Received: {str(path)!r}, "
            f"{errors[0]}. It may be sound, and nothing was changed: mend this, or move it away, "
            "then start again."
        )


def _pass_over(damaged: list[tuple[Found, str]]) -> None:
    if runtime.rank() == 0:
        for found, _ in damaged:
            logger.warning("It is renamed to %s.", set_aside(found))


def _warn(text: str, *values: object) -> None:
    if runtime.rank() == 0:
        logger.warning(text, *values)
