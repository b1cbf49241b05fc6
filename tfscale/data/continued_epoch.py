"""An epoch that begins with a later step: the rest of one that was interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras

from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import epochs_of_fit


def continue_epoch(first_step: int) -> None:
    """Let the epoch that the innermost running `fit` is about to begin start with a later step.

    Steps keep their numbers, for callbacks and the progress bar; this epoch has fewer of them.
    `GlobalBatches` reads none of the batches before; other data is read and dropped up to there.

    Args:
        first_step: Number of the first step, 0 or more.
    """
    epochs = epochs_of_fit()
    if epochs is None or first_step == 0:
        return
    usual = epochs._enumerate_iterator

    def rest() -> Iterator[tuple[int, int, Any]]:
        # Keras asks once per epoch; the next one is a usual one.
        epochs._enumerate_iterator = usual
        adapter = epochs.data_adapter
        adapter.on_epoch_begin()
        data = getattr(adapter, "py_dataset", None)
        if isinstance(data, GlobalBatches):
            adapter.py_dataset = _Rest(data, first_step)
            try:
                yield from _steps(epochs, first_step, 0)
            finally:
                adapter.py_dataset = data
        else:
            yield from _steps(epochs, first_step, first_step)
        adapter.on_epoch_end()

    epochs._enumerate_iterator = rest


def _steps(epochs: Any, first: int, n_dropped: int) -> Iterator[tuple[int, int, Any]]:
    stride = epochs.steps_per_execution
    stop = epochs.steps_per_epoch or epochs._num_batches
    dataset = epochs._get_iterator()
    iterator = iter(dataset.skip(n_dropped) if n_dropped else dataset)
    epochs._current_iterator = iterator
    numbers = range(first, int(stop), stride) if stop else itertools.count(first, stride)
    for step in numbers:
        epochs._steps_seen = step + stride
        yield step, step + stride - 1, iterator


class _Rest(keras.utils.PyDataset):
    """The batches of a data set from some step on."""

    def __init__(self, data: GlobalBatches, first_step: int) -> None:
        super().__init__()
        self._data = data
        self._first = first_step

    @property
    def num_batches(self) -> int:
        return int(self._data.num_batches) - self._first

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._data[index + self._first]

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()
