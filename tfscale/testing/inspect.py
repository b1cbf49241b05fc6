"""Looks into the running job of a rank, for tests about messages rather than results."""

from __future__ import annotations

from typing import Any


def backend_name() -> str:
    """Return the library that carries the messages: "engine", "horovod", or "single" for none."""
    return _runtime().backend().name


def forget_process_sets() -> None:
    """Remove all sets of the program, so that the same ranks can be added again. Collective."""
    for known in list(_runtime().known_process_sets()):
        if type(known) is _runtime().ProcessSet:  # others are the library's own
            _runtime().remove_process_set(known)


def _runtime() -> Any:
    from tfscale.comm import runtime  # imports TensorFlow, which processes that only spawn lack

    return runtime
