"""Where local SGD goes on within its interval."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.checkpoints.reader import Reader
from tfscale.comm import collectives, runtime
from tfscale.comm.runtime import Sum
from tfscale.exchange.local_sgd import AdaptiveInterval

logger = logging.getLogger("tfscale")


def restore_average(
    reader: Reader, name: str, optimizer: Any, groups: Sequence[Sequence[int]], is_exact: bool
) -> None:
    """Go on amid an interval, or begin one from the average of the groups. Collective.

    They begin one where groups are others than before, or what they keep of the last average is:
    by another exchange inside, another compression or outer optimizer.

    Args:
        reader: The checkpoint.
        name: What its arrays are called.
        optimizer: With its parameters and state restored.
        groups: Of the checkpoint; only this rank's where groups are the same.
        is_exact: Whether they are.

    Raises:
        ExchangeError: Communication failed.
    """
    average = getattr(optimizer, "group_average", None)
    if average is None:
        return
    leader = groups[0][0]
    given = average.interval.numpy()  # an interval that does not adapt is the program's to say
    adapts = isinstance(optimizer.strategy.interval, AdaptiveInterval)
    if reader.has(leader, f"{name}/0") and adapts:
        average.interval.assign(reader.get(leader, f"{name}/0"))
    if not is_exact:  # all groups hold the average already
        average.start_from_here()
        return
    kept = _kept(reader, name, average, leader)
    fits = collectives.allreduce(np.int64(kept is not None), op=Sum, name="restored averages")
    if kept is not None and int(fits) == runtime.size():
        for variable, value in zip(average.variables, kept, strict=True):
            variable.assign(value)
        if not adapts:
            average.interval.assign(given)
        return
    average.average_now()
    optimizer.show_own()
    average.start_from_here()
    if average.across.size > 1 and runtime.rank() == 0:
        logger.warning("Groups average in another way than before: they begin with their average.")


def _kept(reader: Reader, name: str, average: Any, leader: int) -> list[np.ndarray] | None:
    """Return a value for each of an average's variables, or None where others were written.

    Each rank has written what it keeps of a segment; what is equal in a group its first one.
    """
    source = runtime.rank() if reader.has(runtime.rank(), f"{name}/0") else leader
    n = len(average.variables)
    names = [f"{name}/{i}" for i in range(n)]
    if not reader.has(source, names[-1]) or reader.has(source, f"{name}/{n}"):
        return None
    kept = [np.asarray(reader.get(source, each)) for each in names]
    shapes = [tuple(variable.shape) for variable in average.variables]
    return kept if [value.shape for value in kept] == shapes else None
