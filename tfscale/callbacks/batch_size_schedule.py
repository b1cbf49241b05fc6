"""Batch sizes that change between the epochs of one `fit`, set beforehand or by a subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfscale.callbacks.base import Callback
from tfscale.config import ConfigError
from tfscale.data.control import keep_settings, put_back_settings
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.slices import check_integer
from tfscale.internals.optimizers import rate_of, update_rule
from tfscale.internals.traits import own_of


class ChangingBatchSize(Callback):
    """Sets the batch size of an epoch when it begins; the data has its own again after `fit`.

    A subclass enters `_take_over` when training begins, and says how large batches are.
    """

    sets_batch_size = True
    _data: GlobalBatches

    def size_of(self, epoch: int) -> int:
        """Return the samples of a step over all ranks in an epoch."""
        return self._data.batch_size

    @contextlib.contextmanager
    def _take_over(self, data: GlobalBatches) -> Iterator[None]:
        """Change the batch size of `data` from now on, and refuse other callbacks that do.

        Settings of the data that are changed inside are put back after `fit`, or if this raises.
        """
        others = [c for c in own_of(self.session.callbacks) if c.sets_batch_size and c is not self]
        if others:
            raise ConfigError(
                "One callback sets the batch size. Received: "
                f"{type(others[0]).__name__} and {type(self).__name__}. Remove one."
            )
        self._data = data
        with keep_settings(data):
            yield

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the size of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._data.batch_size = self.size_of(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the data its own batch size back."""
        super().on_train_end(logs)
        put_back_settings(self._data)


class BatchSizeSchedule(ChangingBatchSize):
    """Set the batch size at given epochs: `BatchSizeSchedule({30: 512, 60: 1024})`.

    The learning rate is left alone: growing the batch takes the place of its decay. Before the
    first epoch named, the data's own batch size holds; the data has it again when `fit` ends. `fit`
    must train on `tfscale.data.GlobalBatches`, with a rate that does not count steps. The size is
    added to the logs as `batch_size`.

    Collective: all ranks must pass it to `fit`, with the same arguments.

    Args:
        sizes: Epoch, counted from 0, and samples of a step over all ranks from there on.

    Raises:
        ConfigError: Epochs or sizes are not whole numbers; when training begins, also if the data
            or the ranks do not suit a size, another callback sets it too, or the optimizer has a
            LearningRateSchedule.

    Source: Smith et al., Don't Decay the Learning Rate, Increase the Batch Size (2018); [T] 5.4.
    """

    compared = ("sizes",)

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()
        if not sizes:
            raise ConfigError("sizes must name an epoch. Received: none. Example: {30: 512}.")
        self.sizes = {
            check_integer("epoch", epoch, 0): check_integer("batch_size", sizes[epoch], 1)
            for epoch in sorted(sizes)
        }
        self._first_size = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse what cannot be served."""
        super().on_train_begin(logs)
        data = self.session.data
        check_data(data)
        rate = rate_of(update_rule(self.model.optimizer))
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                "Larger batches make fewer steps of an epoch, which a schedule counted in steps "
                f"would not follow. Received: learning_rate={type(rate).__name__}. Use a number, "
                "and LearningRateScheduleCallback for a rate that follows epochs."
            )
        with self._take_over(data):
            self._first_size = data.batch_size
            sizes = sorted({data.batch_size, *self.sizes.values()})
            check_sizes(data, sizes, "size", "Name sizes that are multiples of their number.")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the size to the logs."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["batch_size"] = self.size_of(epoch)

    def size_of(self, epoch: int) -> int:
        """Return the batch size of an epoch."""
        reached = [size for begin, size in self.sizes.items() if begin <= epoch]
        return reached[-1] if reached else self._first_size


def check_data(data: Any) -> None:
    """Refuse data whose batch size cannot change."""
    if not isinstance(data, GlobalBatches):
        raise ConfigError(
            "The batch size can change inside of one fit only where tfscale cuts the batches; "
            "repeated or batched datasets would keep serving the old size. Received: "
            f"data={type(data).__name__}. Use tfscale.data.GlobalBatches(x, y, ...), or "
            "GlobalBatches.from_dataset(records, ...) with the dataset not batched or repeated."
        )


def check_sizes(data: GlobalBatches, sizes: Sequence[int], name: str, remedy: str) -> None:
    """Refuse batch sizes that the data or the ranks cannot serve.

    Args:
        data: What is trained on.
        sizes: Samples over all ranks, ascending.
        name: What the user knows the largest size as.
        remedy: What to do about a size that the ranks cannot share.
    """
    if sizes[-1] > data.samples:
        raise ConfigError(
            f"{name} must not be larger than the number of samples, or an epoch has no "
            f"step. Received: {name}={sizes[-1]}, samples={data.samples}. Use a smaller "
            f"{name}, or more data."
        )
    for size in sizes:
        try:
            data.steps_for(size)
        except ConfigError as error:
            raise ConfigError(
                f"Every batch size on the way, {list(sizes)}, must suit the ranks. Received: "
                f"{error} {remedy}"
            ) from error
