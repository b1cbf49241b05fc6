"""Control of `GlobalBatches`: settings changed by a `fit`, resumed epochs, and extra reads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.slices import BatchSlices, check_slices
from tfscale.internals.keras import begin_epoch_at, class_weight_to_sample_weights

logger = logging.getLogger("tfscale")


# Settings that a `fit` changes, and that are put back at its end.


@contextlib.contextmanager
def keep_settings(data: GlobalBatches) -> Iterator[None]:
    """Save batch size and surplus ranks, which a `fit` that begins within the block may change.

    `put_back_settings` restores them; an exception within the block does so at once.
    """
    put_back_settings(data)  # of an earlier `fit` that broke off
    epochs = data._epochs
    epochs.kept = epochs.batch_size, epochs.has_surplus_ranks
    try:
        yield
    except BaseException:
        put_back_settings(data)
        raise


def put_back_settings(data: GlobalBatches) -> None:
    """Restore the saved batch size and surplus ranks, if there are any.

    A batch size that was set outside of `fit` in the meantime stays.
    """
    epochs = data._epochs
    if epochs.kept is not None:
        (epochs.batch_size, epochs.has_surplus_ranks), epochs.kept = epochs.kept, None
        epochs.close()


def use_active_ranks(data: GlobalBatches, weighs_samples: bool = True) -> None:
    """Share batches among `count_active` ranks only, from the next pass on.

    The data needs targets, and serves sample weights from now on: one for each sample, or without
    `weighs_samples` one for the whole batch, which suits losses of any shape.
    """
    epochs = data._epochs
    epochs.has_surplus_ranks, epochs.weighs_samples = True, weighs_samples
    epochs.close()


# The rest of an epoch that was interrupted.


def restore_data(data: Any, state: dict[str, int] | None, first_step: int | None) -> None:
    """Resume an epoch in the data of a running `fit`, if it is `GlobalBatches`.

    Args:
        data: The data that `fit` trains on.
        state: The saved `GlobalBatches.state()`, if there is one.
        first_step: First step of the epoch. An epoch that has begun must keep its batch size; at
            step 0 it may change. None: no epoch begins, and the batch size stays.

    Raises:
        ConfigError: The data has another length, or the ranks cannot share batches that were
            partly trained on.
    """
    if state is None or not isinstance(data, GlobalBatches):
        return
    own = data.batch_size
    if first_step is None:
        state = {**state, "batch_size": own}
    # A callback that sets the batch size (`kept`) continues with its own.
    is_told = state["batch_size"] != own and data._epochs.kept is None
    if is_told and runtime.rank() == 0:
        logger.warning("The checkpoint has batches of %d, fit of %d.", state["batch_size"], own)
    try:
        data.restore(state)
    except ConfigError as error:
        if state["samples"] != data.samples:
            raise
        if first_step == 0:  # then the program's own batch size is used
            data.restore({**state, "batch_size": own})
            return
        raise ConfigError(
            f"An epoch that goes on keeps its batches of {state['batch_size']}. {error} Start with "
            "a number of ranks that divides it, or move this checkpoint away."
        ) from error


def continue_epoch(epochs: Any, epoch: int, first_step: int) -> int:
    """Let the epoch that a running `fit` is about to begin start with a later step.

    `GlobalBatches` does not read the batches before it; other data is read and dropped up to there.
    See `begin_epoch_at`; `epochs` is None outside of a `fit`.
    """
    return first_step if epochs is None else begin_epoch_at(epochs, epoch, first_step, _rest_of)


def _rest_of(data: Any, first_step: int) -> _Rest | None:
    return _Rest(data, first_step) if isinstance(data, GlobalBatches) else None


class _Rest(keras.utils.PyDataset):
    """The batches of a data set from some step on."""

    def __init__(self, data: GlobalBatches, first_step: int) -> None:
        super().__init__()
        self._data = data
        self._first = first_step

    def __len__(self) -> int:
        return int(self._data.num_batches) - self._first

    def __getitem__(self, index: int) -> Any:
        return self._data[index + self._first]

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()


# Batches of any size, independent of those served to `fit`.


def read_batches(
    data: GlobalBatches, batch_size: int, seed: int, class_weight: Mapping[int, float] | None = None
) -> Iterator[Any]:
    """Yield the batches of one epoch, independently of the epoch that the data serves.

    Args:
        data: The data whose samples are read; it is not changed.
        batch_size: Samples of a batch, all on this rank; at most the number of samples.
        seed: Determines the order, if the data is shuffled.
        class_weight: Converted to sample weights, as in `fit`.
    """
    slices = check_slices(BatchSlices(data.samples, batch_size), is_training=True)
    read = data._epochs.source.open_epoch(seed, 0, slices)
    for step in range(slices.steps):
        batch = read(step)
        if class_weight is not None:
            x, y = batch
            batch = x, y, class_weight_to_sample_weights(y, class_weight)
        yield batch
