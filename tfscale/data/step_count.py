"""The number of steps of an epoch, looked up at each use."""

from __future__ import annotations

import functools
import numbers
import operator
from typing import Any

import numpy as np


@functools.total_ordering
class StepCount:
    """An integer whose value may change between two epochs of one `fit`.

    Keras asks a data set for its number of batches once, before the first epoch,
    and keeps the answer for the loop's length and the progress bar's target. A
    plain int would cut longer epochs short without a word; this object is kept
    just the same and says the present number whenever it is used.

    It holds no reference to the data: `model.history.params` may keep it.
    """

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]  # equal to an int now, to another later

    def __init__(self, value: int = 0):
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __int__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return self.value != 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)

    def __eq__(self, other: object) -> Any:
        return self.value == other

    def __lt__(self, other: Any) -> Any:
        return self.value < other

    def __neg__(self) -> int:
        return -self.value

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, format_spec: str) -> str:
        return format(self.value, format_spec)


def _add_arithmetic() -> None:
    """Give StepCount the operators of int; each works on the present value."""

    def forward(function: Any) -> Any:
        return lambda self, other: function(self.value, other)

    def backward(function: Any) -> Any:
        return lambda self, other: function(other, self.value)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)
        setattr(StepCount, f"__{name}__", forward(function))
        setattr(StepCount, f"__r{name}__", backward(function))


_add_arithmetic()
numbers.Integral.register(StepCount)
