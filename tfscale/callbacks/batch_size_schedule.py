"""Batch sizes that change between the epochs of one `fit`, by a schedule or a subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfscale.callbacks.base import Callback
from tfscale.config import ConfigError, check_integer
from tfscale.data.global_batches import GlobalBatches
from tfscale.fit.preparation import prepare
from tfscale.internals.optimizers import rate_of, update_rule
from tfscale.internals.traits import Phase, own_of


class ChangingBatchSize(Callback):
    """Sets the size of each epoch's batches once a subclass has entered `_take_over`."""

    phase = Phase.DECIDE
    sets_batch_size = True
    _data: GlobalBatches

    def size_of(self, epoch: int) -> int:
        """Return the number of samples of a step, over all ranks, in an epoch."""
        return self._data.batch_size

    @contextlib.contextmanager
    def _take_over(self, data: GlobalBatches) -> Iterator[None]:
        """Control the batch size of `data`; its settings are restored after `fit` and errors."""
        others = [c for c in own_of(self.session.callbacks) if c.sets_batch_size and c is not self]
        if others:
            raise ConfigError(
                f"Two callbacks set the batch size. Received: {type(others[0]).__name__} and "
                f"{type(self).__name__}. Remove one."
            )
        self._data = data
        with data.keep_settings():
            yield

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the size of the epoch; let the exchange of dense layers follow it."""
        super().on_epoch_begin(epoch, logs)
        self._data.batch_size = self.size_of(epoch)
        prepare(self.model)
        if self.model.train_function is None:
            self.model.make_train_function(force=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the data its own batch size back."""
        super().on_train_end(logs)
        self._data.put_back_settings()


class BatchSizeSchedule(ChangingBatchSize):
    """Set the batch size at given epochs: `BatchSizeSchedule({30: 512, 60: 1024})`.

    The learning rate is not changed: growing the batch replaces its decay. Before the first epoch
    given, the data's own batch size holds, and again after `fit`. `fit` must train on
    `tfscale.data.GlobalBatches`, with a rate that does not depend on the number of steps. The size
    is added to the logs as `batch_size`.

    Collective: all ranks must pass it to `fit`, with the same arguments.

    Args:
        sizes: Maps an epoch, counted from 0, to the number of samples of a step over all ranks from
            that epoch on.

    Raises:
        ConfigError: Epochs or sizes are not whole numbers; when training begins, also if the data
            or the ranks do not suit a size, another callback sets the batch size, or the optimizer
            has a LearningRateSchedule.

    Source: Smith et al., Don't Decay the Learning Rate, Increase the Batch Size (2018); [T] 5.4.

    Examples:
        >>> tfscale.init()
        >>> data = tfscale.data.GlobalBatches(np.zeros((16, 3)), np.ones((16, 1)), batch_size=4)
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> schedule = tfscale.callbacks.BatchSizeSchedule({1: 8, 2: 16})
        >>> history = model.fit(data, epochs=4, callbacks=[schedule], verbose=0)
        >>> history.history["batch_size"]
        [4, 8, 16, 16]
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
        """Refuse data, sizes and learning rates that do not fit."""
        super().on_train_begin(logs)
        data = self.session.data
        check_data(data)
        rate = rate_of(update_rule(self.model.optimizer))
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                "learning_rate must not count steps: an epoch has fewer of them as batches "
                f"grow. Received: learning_rate={type(rate).__name__}. Use a number, and "
                "LearningRateScheduleCallback for a rate that follows epochs."
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
            "data must be GlobalBatches, whose batch size can change within a fit; batched or "
            f"repeated datasets would keep the old size. Received: data={type(data).__name__}. "
            "Use tfscale.data.GlobalBatches(x, y, ...), or GlobalBatches.from_dataset(records, "
            "...) with the dataset not batched or repeated."
        )


def check_sizes(data: GlobalBatches, sizes: Sequence[int], name: str, remedy: str) -> None:
    """Refuse batch sizes, ascending, that exceed the data or that the ranks cannot share."""
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
                f"batch sizes {list(sizes)} must all suit the ranks. Received: {error} {remedy}"
            ) from error
