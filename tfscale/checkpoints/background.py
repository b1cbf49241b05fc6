"""Writing while something else goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time on a thread, and keeps what went wrong until it is asked for."""

    def __init__(self, uses_thread: bool) -> None:
        """Do nothing yet.

        Args:
            uses_thread: False runs each job at once, before `start` returns.
        """
        self._uses_thread = uses_thread
        self._thread: threading.Thread | None = None
        self._error = ""

    @property
    def has_failed(self) -> bool:
        """Whether the last job has failed by now."""
        return bool(self._error)

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job; waits for the one before.

        Args:
            job: Takes nothing, returns nothing, may raise.
        """
        self._join()
        if not self._uses_thread:
            self._run(job)
            return
        # No daemon: an interpreter that ends waits until the files are complete.
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="tfscale-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> str:
        """Wait for the job; return why it failed, or an empty text. Forgets it."""
        self._join()
        error, self._error = self._error, ""
        return error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # Told by `wait`, to all ranks.
            self._error = f"{type(error).__name__}: {error}"
