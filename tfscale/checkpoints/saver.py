"""Write the parts of checkpoints in the background, and say when checkpoints are due."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tfscale.checkpoints.agreement import raise_together
from tfscale.checkpoints.files import Part, folder_name, prune, write_part
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.data.slices import check_integer


class Saver:
    """Writes one checkpoint at a time, and keeps what went wrong until it is asked for."""

    def __init__(self, directory: Path, keep: int, is_shared: bool, uses_thread: bool) -> None:
        """Do nothing yet.

        Args:
            directory: For checkpoints; on rank 0 only if it is not shared.
            keep: Number of finished checkpoints that stay.
            is_shared: Each rank writes its part. Otherwise all are sent to rank 0.
            uses_thread: False writes the files before `start` returns.
        """
        self.directory = directory
        self.keep = keep
        self.is_shared = is_shared
        self.runs: set[str] = set()  # names of this job's; rank 0 deletes what others left
        # An interpreter that ends waits for it, until the files are complete.
        self._executor = ThreadPoolExecutor(1, "tfscale-checkpoint") if uses_thread else None
        self._job: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the last job has failed by now."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    def start(self, part: Part, run: str) -> None:
        """Begin to write a checkpoint. Collective if the directory is not shared.

        Args:
            part: Of this rank; nothing changes its arrays any more.
            run: Name of the run, with which no part of another one was written.
        """
        folder = self.directory / folder_name(part.info["step"], run)
        self.runs.add(run)
        parts = {runtime.rank(): part}
        if not self.is_shared:
            for rank in range(1, runtime.size()):
                own = part if rank == runtime.rank() else None
                received = objects.broadcast_object(own, rank, name="part of a checkpoint")
                if runtime.rank() == 0:
                    parts[rank] = received

        def write() -> None:
            for rank, each in parts.items():
                write_part(folder, rank, each)
            if not self.is_shared:  # it is finished, and others may go
                prune(self.directory, self.keep, self.runs)

        if self.is_shared or runtime.rank() == 0:
            self._run(write)

    def finish(self) -> None:
        """Wait for the files of all ranks; rank 0 then deletes old ones. Collective.

        Raises:
            ExchangeError: Some rank could not write, on all ranks.
        """
        raise_together(self.wait(), self.is_shared)
        if runtime.rank() == 0:
            prune(self.directory, self.keep, self.runs)

    def wait(self) -> str:
        """Wait for the last job; return why it failed, or an empty text. Forgets it."""
        job, self._job = self._job, None
        error = None if job is None else job.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def _run(self, job: Callable[[], None]) -> None:
        if self._executor is not None:
            self._job = self._executor.submit(job)
            return
        self._job = Future()
        try:
            job()
            self._job.set_result(None)
        except Exception as error:  # told by `wait`, to all ranks
            self._job.set_exception(error)


class Schedule:
    """Counts steps and epochs, which are equal on all ranks, and seconds, which are not."""

    def __init__(self, n_steps: int | None, n_epochs: int | None, seconds: float | None) -> None:
        """Choose; without any number a checkpoint is due after each epoch.

        Args:
            n_steps: Training steps between two, 1 or more.
            n_epochs: Epochs between two, 1 or more.
            seconds: Seconds between two, above 0.

        Raises:
            ConfigError: A number is out of its range.
        """
        if n_steps is None and n_epochs is None and seconds is None:
            n_epochs = 1
        self._n_steps = None if n_steps is None else check_integer("every_n_steps", n_steps, 1)
        self._n_epochs = None if n_epochs is None else check_integer("every_n_epochs", n_epochs, 1)
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"every_seconds must be above 0. Received: every_seconds={seconds}.")
        self._seconds = seconds
        self._start = time.monotonic()

    def start_clock(self) -> None:
        """Count seconds from now on."""
        self._start = time.monotonic()

    def is_due_after_steps(self, before: int, after: int) -> bool:
        """Return whether a multiple of the steps was reached.

        Args:
            before: Steps of the run before those that have ended.
            after: And with them.
        """
        return self._n_steps is not None and after // self._n_steps > before // self._n_steps

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Return whether this was the last of so many epochs.

        Args:
            epoch: Counted from 0.
        """
        return self._n_epochs is not None and (epoch + 1) % self._n_epochs == 0

    def is_time(self) -> bool:
        """Return whether the seconds are over on this rank."""
        return self._seconds is not None and time.monotonic() - self._start >= self._seconds
