"""DatasetBatches: batches of a tf.data.Dataset whose size changes between the epochs of a `fit`."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.slices import StepCount
from tfscale.internals.datasets import (
    INFINITE,
    batch_rows_of,
    has_full_batches,
    rows_of,
    why_not_rebatched,
    with_rows_of_one_shape,
)
from tfscale.internals.keras import dataset_in, serve_dataset

_served: weakref.WeakKeyDictionary[Any, DatasetBatches] = weakref.WeakKeyDictionary()


def served_in(epochs: Any) -> DatasetBatches | None:
    """Return the batches that replace the data of a `fit`, found by Keras's iterator of epochs."""
    return _served.get(epochs)


class DatasetBatches:
    """The rows of a batched dataset, in batches of any size; the size may change between epochs.

    A finite dataset is read from its beginning in each epoch. With `steps_per_epoch` one iterator
    serves all epochs of a `fit`: each takes as many rows as `steps_per_epoch` batches of the
    dataset have, and rows that are left over belong to the next one. The last batch of an epoch may
    be smaller, unless all batches of the dataset are full (`drop_remainder=True`).

    On all ranks a batch is the same one, of which each rank computes its rows (`fit/steps.py`).
    With `is_sharded` the dataset is this rank's own, and a batch has size / n of its rows.

    Every epoch is read from an iterator that is made once, when it begins. So the order of a
    dataset that shuffles depends on the number of epochs only, and can be restored.
    """

    has_surplus_ranks = False

    def __init__(self, dataset: tf.data.Dataset, is_sharded: bool = False) -> None:
        """Look at the steps of a dataset; nothing is read.

        Raises:
            ConfigError: Its elements are no batches, or their rows cannot be put into others.
        """
        why = why_not_rebatched(dataset)
        if why:
            raise ConfigError(
                "dataset must have batches whose rows can be put into larger batches. Received: "
                f"{why}. Use batch() after steps that give each row one shape, or ragged_batch() "
                "for rows of any length."
            )
        self.dataset = dataset
        self.is_sharded = is_sharded
        self._is_full = has_full_batches(dataset)
        self._rows_per_batch = batch_rows_of(dataset)
        self._rows = rows_of(dataset)
        self._steps = StepCount()
        self._end()

    def _end(self) -> None:
        self._epochs: Any = None  # Keras's iterator of epochs, while a `fit` runs
        self._source: Any = None  # the dataset with the weights of classes
        self._iterator: Any = None  # of an epoch, or of all
        self._rows_per_epoch: int | None = None  # of all epochs that one iterator serves
        self._grain = 1  # rows that such an iterator gives at a time
        self._n_epochs = self._n_taken = self._n_left = 0  # of epochs that have ended
        self._resumed_size: int | None = None  # of an epoch that is resumed
        self._size: int | None = None  # set by a callback, for this `fit`

    # Sizes count the samples of all ranks; rows are those that this rank reads.

    @property
    def batch_size(self) -> int:
        """Samples of one step over all ranks: those of the dataset, unless a callback set others.

        Raises:
            ConfigError: The dataset does not tell.
        """
        if self._size is None and self._rows_per_batch is None:
            raise ConfigError(
                "batch_size must be known from the dataset's steps. Received: a dataset whose "
                "steps do not tell. Pass start_batch_size, or a size for epoch 0 to "
                "BatchSizeSchedule, or let only map, shuffle, repeat and prefetch follow batch()."
            )
        return self._size or int(self._rows_per_batch or 0) * self._n_shards

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._local(value)
        self._size = value

    @property
    def samples(self) -> int | None:
        """Number of samples of an epoch over all ranks; None if it is not known."""
        rows = self._rows if self._rows_per_epoch is None else self._rows_per_epoch
        return None if rows < 0 else rows * self._n_shards

    @property
    def _n_shards(self) -> int:
        return runtime.size() if self.is_sharded else 1

    def _local(self, size: int) -> int:
        """Return the rows of a batch that this rank reads."""
        if size % self._n_shards:
            raise ConfigError(
                "batch_size must be a multiple of the number of ranks with sharded=True. Received: "
                f"batch_size={size}, size={self._n_shards}. Choose such sizes."
            )
        return size // self._n_shards

    def steps_for(self, batch_size: int) -> int | None:
        """Return the steps of the present epoch with a batch size; None if that is not known.

        Raises:
            ConfigError: Ranks cannot share that batch size.
        """
        rows, size = self._wanted(), self._local(batch_size)
        if rows is None:
            return None
        return rows // size if self._is_full else math.ceil(rows / size)

    def _wanted(self) -> int | None:
        """Return the rows of the present epoch: with full batches, those left before count, too."""
        if self._rows_per_epoch is not None:
            return self._rows_per_epoch + self._n_left
        return None if self._rows < 0 else self._rows

    @contextlib.contextmanager
    def keep_settings(self) -> Iterator[None]:
        """Let an exception within the block end the control of the batch size."""
        try:
            yield
        except BaseException:
            self.put_back_settings()
            raise

    def put_back_settings(self) -> None:
        """Let the batch size be that of the dataset again."""
        self._size = None

    # A `fit`.

    def begin(self, epochs: Any, sizes: Sequence[int], n_epochs: int) -> StepCount | None:
        """Serve a `fit` that has this dataset from its first epoch on; return its steps per epoch.

        Args:
            epochs: Keras's iterator of epochs.
            sizes: All batch sizes that the `fit` may have, that of its first epoch first.
            n_epochs: Number of epochs.

        Returns:
            A number that follows the batch size; None if the dataset does not tell.

        Raises:
            ConfigError: An epoch has no end, or the dataset ends before the last one.
        """
        self._end()
        self._epochs, self._source = epochs, with_rows_of_one_shape(dataset_in(epochs))
        self.batch_size = sizes[0]
        n_steps, n_batches = epochs.steps_per_epoch, int(self.dataset.cardinality())
        if n_steps is not None and n_steps != n_batches:
            self._require_rows(n_steps, n_batches, n_epochs)
            rows = n_steps * (self._rows_per_batch or self._local(self.batch_size))
            self._rows_per_epoch = rows
            self._grain = math.gcd(rows, *map(self._local, sizes))
        elif n_batches == INFINITE:
            raise ConfigError(
                "steps_per_epoch must be given for a dataset that repeats. Received: an infinite "
                "dataset in fit. Pass steps_per_epoch, or leave repeat() out."
            )
        _served[epochs] = self
        self._set_steps()
        is_known = self._wanted() is not None
        serve_dataset(epochs, self._source, self._steps if is_known else None)
        return self._steps if is_known else None

    def _require_rows(self, n_steps: int, n_batches: int, n_epochs: int) -> None:
        if 0 <= n_batches < n_steps * n_epochs:
            raise ConfigError(
                "steps_per_epoch must leave batches for all epochs: one pass over the dataset "
                f"serves them. Received: steps_per_epoch={n_steps}, {n_epochs} epochs, a dataset "
                f"of {n_batches} batches. Leave steps_per_epoch out, or repeat() the dataset."
            )

    def _set_steps(self) -> None:
        self._steps.set(self.steps_for(self.batch_size) or 0)

    def open_epoch(self) -> None:
        """Serve the epoch that is about to begin in batches of the present size."""
        size = self._local(self.batch_size)
        if self._resumed_size not in (None, self.batch_size):
            raise ConfigError(
                "batch_size must stay that of the checkpoint within an epoch. Received: "
                f"batch_size={self._resumed_size} in the checkpoint, {self.batch_size} in fit. "
                "Start with the same arguments, or move this checkpoint away."
            )
        self._resumed_size = None
        self._set_steps()
        n_rows = self._wanted()
        with tf.device("CPU:0"):
            if self._rows_per_epoch is None:
                batches = self._source.rebatch(
                    size, drop_remainder=self._is_full and n_rows is None
                )
                if self._is_full and n_rows is not None:
                    batches = batches.take(int(self._steps))
                self._iterator = iter(batches.prefetch(tf.data.AUTOTUNE))
                served = _read_by(self._iterator)
            else:
                if self._iterator is None:
                    self._iterator = iter(self._rows_from(self._n_taken))
                n_grains = self._rows_of_epoch() // self._grain
                served = _read_by(self._iterator, n_grains).rebatch(size)
            is_known = n_rows is not None
            served = served.prefetch(1)
            serve_dataset(self._epochs, served, self._steps if is_known else None)

    def end_epoch(self) -> None:
        """Count the epoch that has ended."""
        self._n_epochs += 1
        if self._rows_per_epoch is not None:
            n_rows = self._rows_of_epoch()
            self._n_left += self._rows_per_epoch - n_rows
            self._n_taken += n_rows

    def _rows_of_epoch(self) -> int:
        """Return the rows that the present epoch takes from the iterator of all epochs."""
        rows = self._wanted() or 0
        return rows - rows % self._local(self.batch_size) if self._is_full else rows

    def _rows_from(self, start: int) -> tf.data.Dataset:
        """Return the rows from some row on, `_grain` at a time."""
        rows = self._source
        if start:
            rows = rows.rebatch(math.gcd(start, self._grain))
            rows = rows.skip(start // math.gcd(start, self._grain))
        return rows.rebatch(self._grain, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    # Checkpoints.

    def state(self) -> dict[str, int]:
        """Return the state that determines all later batches, as of the beginning of an epoch."""
        return {
            "epoch": self._n_epochs,
            "batch_size": self.batch_size,
            "samples": self._n_taken * self._n_shards,
            "left": self._n_left * self._n_shards,
        }

    def restore(self, state: dict[str, int], first_step: int) -> None:
        """Continue a running `fit` where `state()` was taken; `first_step` is that of its epoch.

        Raises:
            ConfigError: The number of ranks does not divide the batches of shards.
        """
        self._n_epochs = state["epoch"]
        self._n_taken, self._n_left = self._local(state["samples"]), self._local(state["left"])
        if first_step > 0:
            self.batch_size = self._resumed_size = state["batch_size"]
        self._set_steps()
        if self._rows_per_epoch is None:
            for _ in range(self._n_epochs):  # each draws the seed of one shuffled pass
                iter(self._source)


def _read_by(iterator: Any, n_elements: int | None = None) -> tf.data.Dataset:
    """Return a dataset of the next elements of an iterator, which ends with it at the latest."""
    count = tf.data.Dataset.counter() if n_elements is None else tf.data.Dataset.range(n_elements)
    optionals = count.map(lambda _: iterator.get_next_as_optional())
    optionals = optionals.take_while(lambda element: element.has_value())
    return optionals.map(lambda element: element.get_value())
