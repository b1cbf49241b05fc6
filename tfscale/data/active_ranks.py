"""Batches for fewer ranks than there are: the others repeat a slice with weight 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfscale.config import ConfigError
from tfscale.data.slices import BatchSlices

MIN_LOCAL_BATCH = 2  # samples; normalisation over one sample is none ([T] 5.2.1)


def count_active(batch_size: int, size: int) -> int:
    """Return how many ranks share in a batch.

    Args:
        batch_size: Samples over all ranks.
        size: Number of ranks.

    Returns:
        The largest divisor of `batch_size`, at most `size`, that leaves each at least two samples;
        1 where there is none.
    """
    divisors = range(min(size, batch_size // MIN_LOCAL_BATCH), 1, -1)
    return next((n for n in divisors if batch_size % n == 0), 1)


def may_have_surplus(active_ranks: str) -> bool:
    """Return whether ranks may be left over, given what a user chose.

    Raises:
        ConfigError: It is neither "all" nor "grow".
    """
    if active_ranks not in ("all", "grow"):
        raise ConfigError(
            f"active_ranks must be 'all' or 'grow'. Received: active_ranks={active_ranks!r}. "
            "Use 'all' if in doubt."
        )
    return active_ranks == "grow"


def use_active_ranks(data: Any, weighs_samples: bool = True) -> None:
    """Let batches be shared by as many ranks as `count_active` says, from the next pass on.

    Args:
        data: GlobalBatches; it needs targets and serves sample weights from now on.
        weighs_samples: Serve one weight for each sample. False: one for the whole batch, which
            suits losses of any shape.
    """
    data._epochs.allow_surplus_ranks(weighs_samples)


def active_slices(slices: BatchSlices) -> BatchSlices:
    """Return the slices of a batch that is shared by its active ranks only.

    Args:
        slices: As if all ranks shared in it.

    Returns:
        Slices of `count_active` ranks. Surplus rank r has those of rank r modulo their number: it
        takes part in every exchange with data like any other.
    """
    active = count_active(slices.batch_size, slices.size)
    return BatchSlices(
        slices.samples, slices.batch_size, slices.rank % active, active, slices.drop_remainder
    )


def weighted(
    read: Callable[[int], Any], rank: int, active: int, size: int, weighs_samples: bool = True
) -> Callable[[int], Any]:
    """Return a reader whose sample weights make the mean over all ranks that of the active ones.

    Args:
        read: Returns (x, y) or (x, y, sample_weight) of a step.
        rank: This rank.
        active: Number of active ranks, those below it.
        size: Number of ranks.
        weighs_samples: Whether weights that are made here have shape (samples,), or (1,).

    Returns:
        A function returning (x, y, sample_weight). Weights of active ranks are multiplied by
        size / active, those of surplus ranks by 0.
    """
    factor = size / active if rank < active else 0.0

    def read_weighted(step: int) -> tuple:
        batch = read(step)
        if len(batch) < 2:
            raise ConfigError(
                'active_ranks="grow" weights the loss of surplus ranks with 0, which needs '
                "targets. Received: data without y. Pass y, or use active_ranks='all'."
            )
        x, y = batch[:2]
        if len(batch) == 3:
            weight = keras.tree.map_structure(lambda w: w * factor, batch[2])
            return x, y, weight
        # Keras aligns weights with the last axes of a loss, so (samples,) suits losses of that
        # shape only.
        count = len(keras.tree.flatten(x)[0]) if weighs_samples else 1
        return x, y, np.full((count,), factor, dtype=keras.config.floatx())

    return read_weighted
