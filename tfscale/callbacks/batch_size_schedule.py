"""Batch sizes that change between the epochs of one `fit`, by a schedule or a subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.callbacks.base import Callback
from tfscale.config import ConfigError, check_integer
from tfscale.data.dataset_batches import DatasetBatches, served_in
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import batch_shares as shares
from tfscale.fit.preparation import prepare, prepare_again
from tfscale.fit.session import session_for
from tfscale.fit.steps import begin_epoch
from tfscale.internals.optimizers import rate_of, update_rule
from tfscale.internals.traits import Phase, own_of


class ChangingBatchSize(Callback):
    """Sets the size of each epoch's batches once a subclass has entered `_take_over`."""

    phase = Phase.DECIDE
    sets_batch_size = True
    data: GlobalBatches | DatasetBatches | None = None  # that the callback was given
    sharded = False
    _data: GlobalBatches | DatasetBatches

    def all_sizes(self, data: GlobalBatches | DatasetBatches) -> list[int]:
        """Return all batch sizes that a `fit` may have, that of its first epoch first."""
        return [data.batch_size]

    def set_params(self, params: dict[str, Any]) -> None:
        """Serve the batches of a dataset, before any callback knows the number of steps."""
        super().set_params(params)
        self._serve_dataset(params)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """As for all callbacks."""
        self._serve_dataset(self.params or {})  # unless `set_params` was called before the `fit`
        super().on_train_begin(logs)
        if self.data is not None and self.session.data is not self.data:
            raise ConfigError(
                f"{type(self).__name__} must be given the data that fit trains on. Received: "
                f"another object, {type(self.session.data).__name__}, in fit. Pass the same "
                "GlobalBatches or tf.data.Dataset to both."
            )

    def _serve_dataset(self, params: dict[str, Any]) -> None:
        call, data = session_for(self.model).call, self.data
        is_dataset = isinstance(call.data, tf.data.Dataset)
        if call.epochs is None or not is_dataset or served_in(call.epochs):
            return
        if data is None:
            data = DatasetBatches(call.data, self.sharded)
        if not isinstance(data, DatasetBatches) or data.dataset is not call.data:
            return  # `on_train_begin` refuses it
        if data.is_sharded and shares.are_used():
            raise ConfigError(
                "sharded must be False with tfscale.distribute: every rank reads the whole "
                "dataset. Received: sharded=True. Leave it out, and do not shard the dataset."
            )
        data.put_back_settings()  # of a `fit` that was interrupted
        n_epochs = (params.get("epochs") or 0) - call.initial_epoch
        params["steps"] = data.begin(call.epochs, self.all_sizes(data), n_epochs)
        prepare(self.model)  # its training step for these batches

    def size_of(self, epoch: int) -> int:
        """Return the number of samples of a step, over all ranks, in an epoch."""
        return self._data.batch_size

    @contextlib.contextmanager
    def _take_over(self, data: GlobalBatches | DatasetBatches) -> Iterator[None]:
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
        if isinstance(self._data, DatasetBatches):
            self._data.open_epoch()
        prepare_again(self.model)
        begin_epoch(self.model, epoch, self.session.first_step_of(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch of a dataset."""
        super().on_epoch_end(epoch, logs)
        if isinstance(self._data, DatasetBatches):
            self._data.end_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the data its own batch size back."""
        super().on_train_end(logs)
        self._data.put_back_settings()


class BatchSizeSchedule(ChangingBatchSize):
    """Set the batch size at given epochs: `BatchSizeSchedule({30: 512, 60: 1024})`.

    Epochs count from 0, as arguments of callbacks do: Keras prints epoch 30 as "Epoch 31". The
    learning rate is not changed: growing the batch replaces its decay. Before the first epoch
    given, the data's own batch size holds, and again after `fit`. `fit` must train on
    `tfscale.data.GlobalBatches` or a batched `tf.data.Dataset`, see `AdaptiveBatchSize`, with a
    rate that does not depend on the number of steps. The size is added to the logs as `batch_size`.

    Collective: all ranks must pass it to `fit`, with the same arguments.

    Args:
        data: The data that `fit` trains on, which may be left out: `BatchSizeSchedule(sizes)`.
        sizes: Maps an epoch, counted from 0, to the number of samples of a step over all ranks from
            that epoch on.
        sharded: The dataset of `fit` is this rank's own, as for `AdaptiveBatchSize`.

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

    compared = ("sizes", "sharded")

    def __init__(
        self,
        data: GlobalBatches | tf.data.Dataset | Mapping[int, int] | None = None,
        sizes: Mapping[int, int] | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        if sizes is None and isinstance(data, Mapping):
            data, sizes = None, data
        if not sizes:
            raise ConfigError("sizes must name an epoch. Received: none. Example: {30: 512}.")
        self.sizes = {
            check_integer("epoch", epoch, 0): check_integer("batch_size", sizes[epoch], 1)
            for epoch in sorted(sizes)
        }
        self.data = None if data is None else batches_for(data, sharded)
        self.sharded = sharded
        self._first_size = 0

    def all_sizes(self, data: GlobalBatches | DatasetBatches) -> list[int]:
        """Return the size of the data, unless all epochs have others, and those of the schedule."""
        return [*([] if 0 in self.sizes else [data.batch_size]), *self.sizes.values()]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take over the batch size of the data; refuse sizes and rates that do not suit it."""
        super().on_train_begin(logs)
        data = self.session.data
        check_data(data, self.sharded)
        rate = rate_of(update_rule(self.model.optimizer))
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                "learning_rate must not count steps: an epoch has fewer of them as batches "
                f"grow. Received: learning_rate={type(rate).__name__}. Use a number, and "
                "LearningRateScheduleCallback for a rate that follows epochs."
            )
        with self._take_over(data):
            sizes = self.all_sizes(data)
            self._first_size = sizes[0]
            remedy = "Name sizes that are multiples of their number."
            check_sizes(data, sorted(set(sizes)), "size", remedy)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the size to the logs."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["batch_size"] = self.size_of(epoch)

    def size_of(self, epoch: int) -> int:
        """Return the batch size of an epoch."""
        reached = [size for begin, size in self.sizes.items() if begin <= epoch]
        return reached[-1] if reached else self._first_size


def batches_for(data: Any, sharded: bool) -> GlobalBatches | DatasetBatches:
    """Return the batches of the data that a callback was given; refuse others."""
    if isinstance(data, tf.data.Dataset):
        return DatasetBatches(data, sharded)
    check_data(data, sharded)
    data.put_back_settings()  # of a `fit` that was interrupted
    return data


def check_data(data: Any, sharded: bool = False) -> None:
    """Refuse data whose batch size cannot change."""
    if not isinstance(data, GlobalBatches | DatasetBatches):
        raise ConfigError(
            "data must be a batched tf.data.Dataset or GlobalBatches, whose batch size can change "
            f"within a fit. Received: data={type(data).__name__}. Use one of these."
        )
    if sharded and isinstance(data, GlobalBatches):
        raise ConfigError(
            "sharded must be False with GlobalBatches, which gives each rank its slices. Received: "
            "sharded=True. Leave it out."
        )


def check_sizes(
    data: GlobalBatches | DatasetBatches, sizes: Sequence[int], name: str, remedy: str
) -> None:
    """Refuse batch sizes, ascending, that exceed the data or that the ranks cannot share."""
    if data.samples is not None and sizes[-1] > data.samples:
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
