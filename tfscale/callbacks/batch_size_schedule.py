"""Batch sizes that are set beforehand, at a rate of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfscale.callbacks.adaptive_checks import check_alone, check_data, check_sizes
from tfscale.callbacks.base import Callback
from tfscale.config import ConfigError
from tfscale.data.changes import keep_settings, put_back_settings
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import data_of_fit
from tfscale.data.slices import check_integer
from tfscale.internals.optimizers import update_rule


class BatchSizeSchedule(Callback):
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

    sets_batch_size = True
    compared = ("sizes",)

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()
        if not sizes:
            raise ConfigError("sizes must name an epoch. Received: none. Example: {30: 512}.")
        self.sizes = {
            check_integer("epoch", epoch, 0): check_integer("batch_size", sizes[epoch], 1)
            for epoch in sorted(sizes)
        }
        self._data: GlobalBatches | None = None
        self._first_size = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse what cannot be served."""
        super().on_train_begin(logs)
        data = data_of_fit()
        check_data(data)
        check_alone(self)
        self._check_rate()
        with keep_settings(data):
            self._data, self._first_size = data, data.batch_size
            sizes = sorted({data.batch_size, *self.sizes.values()})
            check_sizes(data, sizes, "size", "Name sizes that are multiples of their number.")

    def _check_rate(self) -> None:
        rate = update_rule(self.model.optimizer)._learning_rate
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                "Larger batches make fewer steps of an epoch, which a schedule counted in steps "
                f"would not follow. Received: learning_rate={type(rate).__name__}. Use a number, "
                "and LearningRateScheduleCallback for a rate that follows epochs."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the size of the epoch."""
        super().on_epoch_begin(epoch, logs)
        assert self._data is not None
        self._data.batch_size = self.size_of(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the size to the logs."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["batch_size"] = self.size_of(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the data its own batch size back."""
        super().on_train_end(logs)
        assert self._data is not None
        put_back_settings(self._data)

    def size_of(self, epoch: int) -> int:
        """Return the batch size of an epoch."""
        reached = [size for begin, size in self.sizes.items() if begin <= epoch]
        return reached[-1] if reached else self._first_size
