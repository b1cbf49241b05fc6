"""An epoch that begins with a later step: the rest of one that was interrupted."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import data_of_fit, epochs_of_fit

logger = logging.getLogger("tfscale")

# Keras 3.10 counts an execution by its first step, later ones by the first and the last.
_HAS_LAST_STEP = tuple(int(part) for part in keras.__version__.split(".")[:2]) >= (3, 11)


def steps_until(model: keras.Model, batch: int) -> int:
    """Return how many steps of an epoch there were, given the number in `on_train_batch_end`."""
    return batch + (1 if _HAS_LAST_STEP else model.steps_per_execution)


def restore_data(state: dict[str, int] | None, first_step: int | None) -> None:
    """Let the `GlobalBatches` of the running `fit`, if it has such, go on in an epoch.

    Args:
        state: `GlobalBatches.state()` of then, if there was one.
        first_step: Of the epoch; one that has begun is cut as it was, another may be cut anew.
            None: no epoch begins, and the batch size stays.

    Raises:
        ConfigError: The data has another length, or the ranks cannot share batches that were
            partly trained on.
    """
    data = data_of_fit()
    if state is None or not isinstance(data, GlobalBatches):
        return
    own = data.batch_size
    if first_step is None:
        state = {**state, "batch_size": own}
    # A callback that sets the size (`kept`) goes on with its own.
    is_told = state["batch_size"] != own and data._epochs.kept is None
    if is_told and runtime.rank() == 0:
        logger.warning("The checkpoint has batches of %d, fit of %d.", state["batch_size"], own)
    try:
        data.restore(state)
    except ConfigError as error:
        if state["samples"] != data.samples:
            raise
        if first_step == 0:  # the program's own size, then
            data.restore({**state, "batch_size": own})
            return
        raise ConfigError(
            f"An epoch that goes on keeps its batches of {state['batch_size']}. {error} Start with "
            "a number of ranks that divides it, or move this checkpoint away."
        ) from error


def continue_epoch(epoch: int, first_step: int) -> int:
    """Let the epoch that the innermost running `fit` is about to begin start with a later step.

    Steps keep their numbers, for callbacks and the progress bar; this epoch has fewer of them.
    `GlobalBatches` reads none of the batches before; other data is read and dropped up to there.

    Args:
        epoch: Its number, from that of the first epoch of training.
        first_step: Number of the first step, 0 or more.

    Returns:
        The first step: an earlier one where other ranks' data leaves the epoch no such step.
    """
    epochs = epochs_of_fit()
    if epochs is None:
        return first_step
    place, steps = _place_in_pass(epochs, epoch)
    if steps is not None and first_step >= steps:
        first_step = max(0, steps - epochs.steps_per_execution)
    n_dropped = place + first_step
    if n_dropped == 0:
        return 0
    usual = epochs._enumerate_iterator

    def rest() -> Iterator[tuple[Any, ...]]:
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
            yield from _steps(epochs, first_step, n_dropped)
        adapter.on_epoch_end()

    epochs._enumerate_iterator = rest
    return first_step


def _place_in_pass(epochs: Any, epoch: int) -> tuple[int, int | None]:
    """Return how many batches epochs before have taken of the same pass, and this one's steps.

    Steps are None where nobody knows them, and of `GlobalBatches`: those are cut as they were,
    which Keras has not seen yet.
    """
    n_batches, per_epoch = epochs._num_batches, epochs.steps_per_epoch
    if isinstance(getattr(epochs.data_adapter, "py_dataset", None), GlobalBatches):
        return 0, None
    if not n_batches or not per_epoch:
        return 0, per_epoch or n_batches
    stride = epochs.steps_per_execution
    taken = math.ceil(per_epoch / stride) * stride
    place = epoch % math.ceil(n_batches / taken) * taken
    return place, min(per_epoch, n_batches - place)


def _steps(epochs: Any, first: int, n_dropped: int) -> Iterator[tuple[Any, ...]]:
    stride = epochs.steps_per_execution
    stop = epochs.steps_per_epoch or epochs._num_batches
    dataset = epochs._get_iterator()
    iterator = iter(dataset.skip(n_dropped) if n_dropped else dataset)
    epochs._current_iterator, epochs._steps_seen = iterator, n_dropped or first
    # Where a pass has several epochs, Keras keeps its iterator, and makes another at the end.
    length = epochs._num_batches if epochs.steps_per_epoch else None
    numbers = range(first, int(stop), stride) if stop else itertools.count(first, stride)
    for step in numbers:
        if length and epochs._steps_seen >= length:
            break
        epochs._steps_seen += stride
        yield (step, *([step + stride - 1] if _HAS_LAST_STEP else []), iterator)
    if length and epochs._steps_seen >= length:
        epochs._current_iterator, epochs._steps_seen = iter(dataset), 0


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
