"""Requests to save and stop: by SIGTERM, as schedulers send it, or by a call.

Examples:
    >>> tfscale.init()
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    >>> tfscale.preemption.request_save_and_stop()
    >>> callbacks = [tfscale.callbacks.Checkpoint("run")]
    >>> model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)
    Traceback (most recent call last):
        ...
    SystemExit: 75
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tfscale.comm import process

__all__ = ["request_save_and_stop"]

_is_requested = False


def request_save_and_stop() -> None:
    """Let a `fit` with `tfscale.callbacks.Checkpoint` save and end all ranks soon.

    May be called on any rank, from any thread and from a signal handler; it returns at once. About
    a second later, between two steps, all ranks write a checkpoint and leave with
    `SystemExit(tfscale.exit_codes.PREEMPTED)`. Without that callback nothing happens.
    """
    global _is_requested
    _is_requested = True
    process.write_request()


def is_requested() -> bool:
    """Return whether this rank was asked to save and stop."""
    return _is_requested


def forget_request() -> None:
    """Clear the fulfilled request; the process that watches this rank now trusts exit code 75."""
    global _is_requested
    _is_requested = False
    process.write_request(has_saved=True)


class TermHandler:
    """Treats SIGTERM as a request while installed and while a `fit` fulfils requests.

    If it does not, as after a `fit` that ended by an error, the former handler gets the signal.
    """

    def __init__(self, is_heard: Callable[[], bool]) -> None:
        self._is_heard = is_heard  # returns whether a request would be fulfilled now
        self._former: Any = None
        self._is_installed = False
        self._pid = 0

    def install(self) -> None:
        """Handle SIGTERM from now on, if this is the main thread: Python requires it."""
        if not self._is_installed and threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            self._former = signal.signal(signal.SIGTERM, self._handle)
            self._is_installed = True

    def remove(self) -> None:
        """Put the former handler back."""
        if self._is_installed:
            self._is_installed = False
            with contextlib.suppress(ValueError):  # another thread
                # None stands for a handler that Python did not install.
                signal.signal(signal.SIGTERM, self._former or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child inherits this handler and the frames of `fit`, but fulfils no requests.
        if os.getpid() == self._pid and self._is_heard():
            request_save_and_stop()
        else:
            self.remove()
            os.kill(os.getpid(), number)
