"""The epoch of a source that is being served, and the settings of the next one."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.slices import BatchSlices, check_integer, check_slices, count_active
from tfscale.data.sources import BatchSource


class StepCount:
    """An integer whose value may change between two epochs of one `fit`.

    Keras reads the number of batches of a data set once, before the first epoch, and uses it for
    the length of the loop and the target of the progress bar. With a plain int, later epochs with
    more steps would silently be cut short; the operators of this object use the present value.

    It holds no reference to the data, because `model.history.params` may keep it.
    """

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]  # equal to an int now, to another later

    def __init__(self, value: int = 0):
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)


def _add_operators() -> None:
    """Add the operators of int to StepCount."""

    def forward(function: Any) -> Any:
        return lambda self, *others: function(self.value, *others)

    def backward(function: Any) -> Any:
        return lambda self, other: function(other, self.value)

    comparisons = ("eq", "lt", "le", "gt", "ge")
    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    for name in ("neg", *comparisons, *arithmetic):
        setattr(StepCount, f"__{name}__", forward(getattr(operator, name)))
    for name in arithmetic:
        setattr(StepCount, f"__r{name}__", backward(getattr(operator, name)))
    for function in (float, bool, repr, format):
        setattr(StepCount, f"__{function.__name__}__", forward(function))


_add_operators()
numbers.Integral.register(StepCount)


class OpenEpoch(NamedTuple):
    """One epoch being served: immutable, so that any thread may read any step at any time."""

    seed: int
    number: int
    slices: BatchSlices
    read: Callable[[int], Any]


class Epochs:
    """The epoch being served, and the settings with which the next one will be opened.

    Settings are plain attributes and take effect at the next `refresh`. They are changed by the
    main thread, and read by tf.data's threads too.
    """

    def __init__(self, source: BatchSource, is_shuffled: bool, drop_remainder: bool):
        self.source = source
        self.is_shuffled, self.drop_remainder = is_shuffled, drop_remainder
        self.seed = self.number = 0
        self.batch_size = 1
        self.has_surplus_ranks = False  # whether fewer ranks than there are may share a batch
        self.weighs_samples = True  # sample weights: one for each sample, or one for the batch
        self.steps = StepCount()  # of the epoch being served
        self.rank_and_size: tuple[int, int] | None = None  # set by tests only
        self.kept: tuple[int, bool] | None = None  # batch size and surplus ranks before `fit`
        self._open: OpenEpoch | None = None

    def present(self) -> OpenEpoch:
        """Return the epoch being served; the first use opens it."""
        return self._open or self.refresh()

    def refresh(self, is_trained_on: bool = False) -> OpenEpoch:
        """Open the epoch of the present settings, unless it is being served already.

        With `is_trained_on` data that is not shuffled must meet the requirements of training, too.
        """
        slices = self.slices(self.batch_size)
        key = (self.seed, self.number, check_slices(slices, is_trained_on or self.is_shuffled))
        if self._open is None or self._open[:3] != key:
            read = self.source.open_epoch(*key)
            if self.has_surplus_ranks:
                rank, size = self._rank_and_size()
                read = _weighted(read, rank, key[2].size, size, self.weighs_samples)
            self._open = OpenEpoch(*key, read)
            self.steps.value = self._open.slices.steps
        return self._open

    def close(self) -> None:
        """Close the epoch; its next use opens it again with the present settings."""
        self._open = None

    def slices(self, batch_size: Any) -> BatchSlices:
        """Return this rank's slices of batches of another size, or raise if it cannot be used."""
        batch_size = check_integer("batch_size", batch_size, 1)
        rank, size = self._rank_and_size()
        if self.has_surplus_ranks:  # they serve slices of others, to take part in every exchange
            size = count_active(batch_size, size)
        slices = BatchSlices(
            self.source.samples, batch_size, rank % size, size, self.drop_remainder
        )
        return check_slices(slices, is_training=self.is_shuffled)

    def require_each_in_order(self) -> None:
        """Raise if `predict` would return rows in another order than the data's, or not all."""
        n_dropped = self.source.samples % self.batch_size if self.drop_remainder else 0
        if self.is_shuffled or n_dropped:
            order = "shuffled" if self.is_shuffled else "unshuffled"
            raise ConfigError(
                "predict must give a row for each sample, in the data's order. Received: "
                f"{order} data of which {n_dropped} samples are left out. Use shuffle=False (of a "
                "dataset shuffle_buffer=0) and drop_remainder=False."
            )

    def is_ready(self) -> bool:
        """Return whether the number of ranks is known: data may be created before `init()`."""
        return self.rank_and_size is not None or runtime.is_initialized()

    def _rank_and_size(self) -> tuple[int, int]:
        return self.rank_and_size or (runtime.rank(), runtime.size())


def _weighted(
    read: Callable[[int], Any], rank: int, active: int, size: int, weighs_samples: bool
) -> Callable[[int], Any]:
    """Return a reader with sample weights: the mean over all ranks is that over the active ones.

    Weights of the first `active` ranks are multiplied by size / active, those of the others by 0.
    If `read` returns no weights, they have shape (samples,), or (1,) without `weighs_samples`.
    """
    factor = size / active if rank < active else 0.0

    def read_weighted(step: int) -> tuple:
        batch = read(step)
        if len(batch) < 2:
            raise ConfigError(
                'active_ranks="grow" weights the loss of surplus ranks with 0, which needs '
                "targets. Received: data without y. Pass y, or use active_ranks='all'."
            )
        x, y = batch[:2]
        if len(batch) == 3:
            weight = keras.tree.map_structure(lambda w: w * factor, batch[2])
            return x, y, weight
        # Keras broadcasts weights against the last axes of a loss, so (samples,) suits only losses
        # of that shape.
        count = len(keras.tree.flatten(x)[0]) if weighs_samples else 1
        return x, y, np.full((count,), factor, dtype=keras.config.floatx())

    return read_weighted
