"""Batches of any size of a data set, beside what `fit` is being served."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from tfscale.data.epochs import BatchSource, Epochs
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


def weigh_classes(data: GlobalBatches, weights: Mapping[int, float]) -> GlobalBatches:
    """Return what `read_batches` reads with the sample weights that `fit` makes of classes.

    Args:
        data: Serves (x, y); y as `fit` wants it for `class_weight`.
        weights: By class.
    """
    epochs, weighed = data._epochs, copy.copy(data)
    source = _WeighedClasses(epochs.source, weights)
    weighed._epochs = Epochs(source, epochs.is_shuffled, epochs.drop_remainder)
    return weighed


class _WeighedClasses:
    """Batches with a weight for each sample's class."""

    def __init__(self, source: BatchSource, weights: Mapping[int, float]) -> None:
        self._source = source
        self._weights = weights

    @property
    def samples(self) -> int:
        return self._source.samples

    def probe(self) -> list[Any]:
        return self._source.probe()

    def open_epoch(self, seed: int, epoch: int, slices: BatchSlices) -> Callable[[int], Any]:
        read = self._source.open_epoch(seed, epoch, slices)

        def read_weighed(step: int) -> tuple:
            x, y = read(step)
            return x, y, class_weight_to_sample_weights(y, self._weights)

        return read_weighed
