"""Parts of an epoch that is served: its number of steps, its reader, weights of samples."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tfscale.config import ConfigError
from tfscale.data.slices import BatchSlices


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


def weighted(
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
