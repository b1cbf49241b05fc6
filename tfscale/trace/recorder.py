"""Events of the engine, for any number of listeners; each event is taken from it once."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from tfscale import runtime
from tfscale.errors import ExchangeError

_lock = threading.Lock()
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


class Listener:
    """Receives what ends from its creation on, for as long as it is kept."""

    def __init__(self) -> None:
        """Begin to listen."""
        self._parts: list[np.ndarray] = []
        if not has_events():
            raise ExchangeError(
                "Collectives are timed by tfscale's engine. Received: the backend "
                f"{runtime.backend().name!r}. Start with an MPI launcher, or backend='engine'."
            )
        self._none = drain()[:0]
        with _lock:
            _listeners.add(self)

    def take(self) -> np.ndarray:
        """Return the events since the last call: an array with the fields of the engine's Event."""
        drain()
        with _lock:
            parts, self._parts = self._parts, []
        return np.concatenate([self._none, *parts])

    def close(self) -> None:
        """Listen no longer."""
        with _lock:
            _listeners.discard(self)

    def add(self, events: np.ndarray) -> None:
        """Take note of events."""
        self._parts.append(events)


def has_events() -> bool:
    """Return whether the backend records its collectives."""
    return hasattr(runtime.backend(), "event_array")


def drain() -> np.ndarray:
    """Hand the engine's new events to the listeners, and return them. From any thread."""
    engine: Any = runtime.backend()
    with _lock:
        events = engine.event_array()
        for listener in _listeners:
            if len(events):
                listener.add(events)
    return events
