"""Batch sizes that are set beforehand, at a rate of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfscale.callbacks.adaptive.growing_batch import ChangingBatchSize, check_data, check_sizes
from tfscale.config import ConfigError
from tfscale.data.slices import check_integer
from tfscale.internals.keras import rate_of
from tfscale.internals.optimizers import update_rule


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

        def check() -> None:
            self._first_size = data.batch_size
            sizes = sorted({data.batch_size, *self.sizes.values()})
            check_sizes(data, sizes, "size", "Name sizes that are multiples of their number.")

        rate = rate_of(update_rule(self.model.optimizer))
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                "Larger batches make fewer steps of an epoch, which a schedule counted in steps "
                f"would not follow. Received: learning_rate={type(rate).__name__}. Use a number, "
                "and LearningRateScheduleCallback for a rate that follows epochs."
            )
        self._take_over(data, check)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the size to the logs."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["batch_size"] = self.size_of(epoch)

    def size_of(self, epoch: int) -> int:
        """Return the batch size of an epoch."""
        reached = [size for begin, size in self.sizes.items() if begin <= epoch]
        return reached[-1] if reached else self._first_size
