"""Batches of any size of a data set, beside what `fit` is being served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfscale.data.global_batches import GlobalBatches
from tfscale.data.slices import BatchSlices, check_slices


def read_batches(data: GlobalBatches, batch_size: int, seed: int) -> Iterator[Any]:
    """Yield the batches of one epoch that nobody trains on, in an order of its own.

    Args:
        data: Whose samples to read; what it serves does not change.
        batch_size: Samples of a batch; all on this rank.
        seed: Decides the order, if the data is shuffled at all.

    Raises:
        ConfigError: The batch is larger than the data.
    """
    slices = check_slices(BatchSlices(data.samples, batch_size), is_training=True)
    read = data._epochs.source.open_epoch(seed, 0, slices)
    return (read(step) for step in range(slices.steps))
