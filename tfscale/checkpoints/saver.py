"""The checkpoints of a directory: find the newest sound one, and write new ones when due.

Either ranks share the directory and each writes its own files, or rank 0 writes and reads for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tfscale.checkpoints import files
from tfscale.comm import collectives, objects, runtime
from tfscale.config import ConfigError, ExchangeError, check_integer, require

logger = logging.getLogger("tfscale")

ROUND_S = 1.0


class Saver:
    """Writes one checkpoint at a time; an error of writing is kept for `wait`."""

    # What savers of this process are writing; one may belong to a `fit` that an error has ended.
    _writing: ClassVar[set[Future[None]]] = set()

    def __init__(self, directory: Path, keep: int, is_shared: bool, is_asynchronous: bool) -> None:
        self.directory = directory  # used by rank 0 only if it is not shared
        self.keep = keep  # number of finished checkpoints that stay
        self.is_shared = is_shared  # each rank writes its part; otherwise all are sent to rank 0
        self.runs: set[str] = set()  # of this job; rank 0 deletes unfinished ones of other runs
        self.is_asynchronous = is_asynchronous
        # Python waits for this thread at exit, until the files are complete.
        self._executor = ThreadPoolExecutor(1, "tfscale-checkpoint")
        self._job: Future[None] | None = None

    def name_run(self) -> str:
        """Return a unique name of 8 hexadecimal digits, equal on all ranks. Collective."""
        new_id = uuid.uuid4().hex[:8] if runtime.rank() == 0 else None
        run: str = objects.broadcast_object(new_id, 0, name="name of a run")
        self.runs.add(run)  # before any other rank begins to write under this name
        return run

    def make_directory(self, run: str) -> None:
        """Make the directory; if it is shared, require that all ranks see it. Collective."""
        mark, error = self.directory / f".{run}", ""
        if runtime.rank() == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                mark.touch()
            except OSError as failure:
                error = f"rank 0: {failure}"
        error = objects.broadcast_object(error, 0, name="directory of checkpoints")
        if self.is_shared and not error and not os.path.exists(mark):  # `exists` raises no error
            error = f"rank {runtime.rank()} does not see what rank 0 wrote there"
        errors = [text for text in objects.allgather_object(error, name="see directory") if text]
        if runtime.rank() == 0:
            with contextlib.suppress(OSError):
                mark.unlink()
        if errors:
            need, way = "one that rank 0 can write to", "Pass another folder."
            if self.is_shared:
                need = "one that all ranks write to and read from"
                way = "Pass a folder that all ranks share, or shared=False: rank 0 writes for all."
            raise ConfigError(
                f"directory must be {need}. Received: {str(self.directory)!r}, {errors[0]}. {way}"
            )

    def newest_sound(self) -> list[files.Part] | None:
        """Return the parts of the newest sound checkpoint; None if there never was one. Collective.

        Each file is checked by one rank, and each rank reads the arrays it needs; if the directory
        is not shared, rank 0 checks all parts and sends them. Skipped checkpoints are renamed if
        they are damaged; unfinished ones are left to be deleted later. All ranks raise if all are
        damaged, or if one cannot be read.
        """
        damaged: list[tuple[Path, str]] = []
        share = (runtime.rank(), runtime.size()) if self.is_shared else (0, 1)
        listed = partial(files.list_checkpoints, self.directory)
        for checkpoint in _from_rank_zero(self.directory, listed, "checkpoints"):
            path = self.directory / checkpoint.path.name  # this rank's path
            checkpoint = dataclasses.replace(checkpoint, path=path)
            parts: list[files.Part] = []
            error, unreadable = "", ""
            if not checkpoint.is_finished and not checkpoint.unreadable:
                _warn("Checkpoint %s is passed over: %s.", path, checkpoint.why_unfinished())
                continue
            try:
                if self.is_shared or runtime.rank() == 0:
                    parts = [
                        files.Part.stored(path, manifest) for manifest in checkpoint.check(share)
                    ]
            except files.DamagedError as failure:
                error = str(failure)
            except files.UnreadableError as failure:
                unreadable = f"rank {runtime.rank()}: {failure}"
            faults_by_rank = objects.allgather_object((error, unreadable), name="check")
            _require_readable(path, [text for _, text in faults_by_rank if text])
            errors = [text for text, _ in faults_by_rank if text]
            if not errors:
                for other, _ in damaged if runtime.rank() == 0 else ():
                    text = "%s is renamed to %s."
                    logger.warning(text, other.name, files.set_aside(other) or "nothing")
                return parts if self.is_shared else _sent_by_rank_zero(checkpoint, parts)
            damaged.append((path, errors[0]))
            _warn("Checkpoint %s is passed over: %s.", path, errors[0])
        if damaged:
            reasons = "; ".join(f"{path.name}: {error}" for path, error in damaged)
            raise ConfigError(
                f"No checkpoint to resume from is intact. Received: {str(self.directory)!r} with "
                f"damaged ones only: {reasons}. Remove them, or pass another directory, to start "
                "over."
            )
        return None

    @property
    def has_failed(self) -> bool:
        """Whether the last job has failed by now."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    def start(self, part: files.Part, run: str) -> None:
        """Start writing this rank's part. Collective if the directory is not shared."""
        folder = self.directory / files.folder_name(part.info["step"], run)
        self.runs.add(run)
        parts = {runtime.rank(): part}
        for rank in range(1, 1 if self.is_shared else runtime.size()):
            sent = part if rank == runtime.rank() else None
            received = objects.broadcast_object(sent, rank, name="part of a checkpoint")
            if runtime.rank() == 0:
                parts[rank] = received
        if self.is_shared or runtime.rank() == 0:
            self._job = self._executor.submit(self._write, folder, parts)
            self._writing.add(self._job)
            self._job.add_done_callback(self._writing.discard)
            if not self.is_asynchronous:
                error = self._job.exception()  # waits; `wait` reports it to all ranks
                if error is not None and not isinstance(error, Exception):
                    self._job = None
                    raise error

    def _write(self, folder: Path, parts: dict[int, files.Part]) -> None:
        for rank, part in parts.items():
            files.write_part(folder, rank, part)
        if not self.is_shared:  # all parts are written, so old checkpoints may be deleted
            files.prune(self.directory, self.keep, self.runs)

    def wait(self) -> str:
        """Wait until the last write has ended; return its error as text, or an empty text."""
        job, self._job = self._job, None
        error = None if job is None else job.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def wait_for_earlier(self) -> None:
        """Wait until all savers of this process have written what they began."""
        self.wait()
        futures.wait(self._writing.copy())

    def finish(self) -> None:
        """Wait for the files of all ranks; rank 0 then deletes old ones. Collective."""
        fault = "Could not write" if self.is_shared else "rank 0 could not write"

        def describe(errors: str) -> ExchangeError:
            return ExchangeError(
                f"{fault} parts of a checkpoint. Received: {errors}. Earlier checkpoints are "
                "still there. Make room, then start the job again."
            )

        objects.raise_together(self.wait(), describe, "parts of a checkpoint")
        if runtime.rank() == 0:
            files.prune(self.directory, self.keep, self.runs)


os.register_at_fork(after_in_child=Saver._writing.clear)  # the thread stays with the parent


def _sent_by_rank_zero(checkpoint: files.Found, parts: list[files.Part]) -> list[files.Part]:
    """Read all parts on rank 0, one at a time, and return them on all ranks."""

    def read(rank: int) -> files.Part:
        return files.Part(parts[rank].info, dict(parts[rank].arrays))

    name = "part of a checkpoint"
    return [
        _from_rank_zero(checkpoint.path, partial(read, n), name) for n in range(checkpoint.size)
    ]


def _from_rank_zero(path: Path, read: Callable[[], Any], name: str) -> Any:
    """Read on rank 0 and return the result on all ranks, or raise on all. Collective."""
    result: Any = None
    error = ""
    if runtime.rank() == 0:
        try:
            result = read()
        except (files.DamagedError, files.UnreadableError) as failure:
            error = f"rank 0: {failure}"
    result, error = objects.broadcast_object((result, error), 0, name=name)
    _require_readable(path, [error] if error else [])
    return result


def _require_readable(path: Path, errors: list[str]) -> None:
    """Raise if there are errors: with an older checkpoint than the newest, steps would be lost."""
    if errors:
        raise ConfigError(
            f"Could not read a checkpoint on all ranks. Received: {str(path)!r}, {errors[0]}. It "
            "may be sound, and nothing was changed: mend this, or move it away, then start "
            "again."
        )


def _warn(text: str, *values: object) -> None:
    if runtime.rank() == 0:
        logger.warning(text, *values)


# When checkpoints are due.


class Requests(NamedTuple):
    """Requests of this rank, or of any rank after a round."""

    stops: bool = False
    has_failed: bool = False
    is_time: bool = False


class Schedule:
    """Decides when checkpoints are due, by steps and epochs (equal on all ranks) or seconds.

    Clocks differ between ranks, so about once a second a round of exchange at the end of a step
    tells all whether some rank's seconds have passed. The number of steps between two rounds comes
    from the slowest rank's times, which are exchanged too. A single process has no rounds.
    """

    def __init__(self, n_steps: int | None, n_epochs: int | None, seconds: float | None) -> None:
        """Set the intervals; without any, a checkpoint is due after each epoch."""
        if n_steps is None and n_epochs is None and seconds is None:
            n_epochs = 1
        self._n_steps = None if n_steps is None else check_integer("every_n_steps", n_steps, 1)
        self._n_epochs = None if n_epochs is None else check_integer("every_n_epochs", n_epochs, 1)
        require(seconds is None or seconds > 0, "every_seconds", "above 0", seconds)
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Start again, with a round after the first step."""
        self._interval = 1  # steps between two rounds
        self._n_waited = 0
        self._round_start = time.monotonic()
        self.start_clock()

    def start_clock(self) -> None:
        """Count seconds from now on."""
        self._start = time.monotonic()

    def is_due_after_steps(self, before: int, after: int) -> bool:
        """Return whether a multiple of `n_steps` was reached between two step counts."""
        return self._n_steps is not None and after // self._n_steps > before // self._n_steps

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Return whether a checkpoint is due after an epoch, counted from 0."""
        return self._n_epochs is not None and (epoch + 1) % self._n_epochs == 0

    def end_step(self, stops: bool, has_failed: bool) -> Requests:
        """Return the requests of all ranks, given those of this one. Collective in a round."""
        now = time.monotonic()
        is_time = self._seconds is not None and now - self._start >= self._seconds
        if runtime.is_single():
            return Requests(stops, has_failed, is_time)
        self._n_waited += 1
        if self._n_waited < self._interval:
            return Requests()
        request = np.array(
            [stops, has_failed, is_time, max(now - self._round_start, 1e-6)], np.float64
        )
        largest = collectives.allreduce(request, op=runtime.Max, name="requests for checkpoints")
        *requests, longest_s = np.asarray(largest).tolist()
        wanted = int(self._interval * ROUND_S / longest_s)
        self._interval = max(1, min(2 * self._interval, wanted))
        self._n_waited, self._round_start = 0, time.monotonic()
        return Requests(*map(bool, requests))


def agree_on_end(is_new: bool, stops: bool, is_broken: bool = False) -> tuple[bool, bool]:
    """Return whether to save, and whether some rank was asked to stop. Collective.

    The ranks save if some rank has unsaved steps and no rank's model is broken: a broken one would
    replace a sound checkpoint.
    """
    ends_by_rank = objects.allgather_object((is_new, stops, is_broken), name="end of training")
    is_new, stops = any(new for new, _, _ in ends_by_rank), any(stop for _, stop, _ in ends_by_rank)
    broken = [rank for rank, (_, _, is_so) in enumerate(ends_by_rank) if is_so]
    if is_new and broken:
        _warn("The last steps are not saved: weights of ranks %s are not finite.", broken)
    return is_new and not broken, stops
