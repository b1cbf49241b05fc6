"""Data sets in files: one rank looks, all ranks know."""

from collections.abc import Callable
from typing import TypeVar

import tfscale

T = TypeVar("T")


def on_first_rank(make: Callable[[], T]) -> T:
    """Return what `make` returns on rank 0, on all ranks; they raise what it raises there.

    Listing a million files is done once, and all ranks have them in the same order.

    Collective: all ranks must call it.
    """
    made: tuple[T | None, Exception | None] = (None, None)
    if tfscale.rank() == 0:
        try:
            made = make(), None
        except (OSError, ValueError) as error:
            made = None, error
    result, failure = tfscale.broadcast_object(made, 0, name="data set")
    if failure is not None:
        raise failure
    return result
