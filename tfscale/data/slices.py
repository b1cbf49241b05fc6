"""Slices of global batches by rank, and their number: without TensorFlow and MPI."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from typing import Any

import numpy as np

from tfscale.config import ConfigError

MIN_LOCAL_BATCH = 2  # samples; one sample cannot be normalised ([T] 5.2.1)


@dataclasses.dataclass(frozen=True)
class BatchSlices:
    """The slices of every global batch of an epoch that one rank serves.

    Global batch `s` is the samples at positions `s * batch_size` up to `(s + 1) * batch_size` of
    the epoch's order; rank r serves the r-th of `size` equal pieces. The last, smaller batch is cut
    into pieces whose lengths differ by one at most, the longer ones first. With fewer rows than
    ranks, the last ranks have none.
    """

    samples: int  # of an epoch, over all ranks
    batch_size: int  # of one global batch, over all ranks; a multiple of `size`
    rank: int = 0
    size: int = 1
    drop_remainder: bool = True  # leave the samples after the last full batch out

    @property
    def local_batch_size(self) -> int:
        """Number of samples of a full global batch that this rank serves."""
        return self.batch_size // self.size

    @property
    def full_batches(self) -> int:
        """Number of global batches that are full."""
        return self.samples // self.batch_size

    @property
    def remainder(self) -> int:
        """Number of samples of the last, smaller global batch; 0 if there is none."""
        return 0 if self.drop_remainder else self.samples % self.batch_size

    @property
    def global_batches(self) -> int:
        """Number of global batches, the last, smaller one included."""
        return self.full_batches + (self.remainder > 0)

    @property
    def steps(self) -> int:
        """Number of global batches of which this rank has rows."""
        return self.full_batches + (self.remainder > self.rank)

    @property
    def are_even(self) -> bool:
        """True if all ranks have equally many rows of each global batch."""
        return self.remainder % self.size == 0

    def rows(self, step: int) -> int:
        """Return the number of rows of a global batch."""
        return self.batch_size if step < self.full_batches else self.remainder

    def bounds(self, step: int) -> tuple[int, int]:
        """Return start and stop of this rank's slice of a global batch, in the epoch's order.

        A rank without rows of the last batch gets the first one, for steps in which it counts
        nowhere.
        """
        if not 0 <= step < self.global_batches:
            raise IndexError(f"step must be below {self.global_batches}. Received: step={step}.")
        share, longer = divmod(self.rows(step), self.size)
        start = step * self.batch_size
        if share == 0 and self.rank >= longer:
            return start, start + 1
        start += self.rank * share + min(self.rank, longer)
        return start, start + share + (self.rank < longer)


def count_active(batch_size: int, size: int) -> int:
    """Return the number of ranks, at least 1, that can share a batch with two samples each."""
    divisors = range(min(size, batch_size // MIN_LOCAL_BATCH), 1, -1)
    return next((n for n in divisors if batch_size % n == 0), 1)


def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """Return the order of an epoch's samples, which depends on the arguments only."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def check_slices(slices: BatchSlices, must_be_even: bool = False) -> BatchSlices:
    """Return `slices` unchanged if all ranks can share the batches, else raise.

    They must be even in training that does not weigh ranks by their rows: only then is the mean
    over ranks the mean over samples.
    """
    batch_size, size, samples = slices.batch_size, slices.size, slices.samples
    if batch_size % size:
        lower = batch_size // size * size
        choice = f"{lower} or {lower + size}" if lower else str(size)
        raise ConfigError(
            "batch_size counts the samples of all ranks together and must be a multiple of "
            f"the number of ranks. Received: batch_size={batch_size}, size={size}. "
            f"Use batch_size={choice}, or another number of ranks."
        )
    if slices.drop_remainder and batch_size > samples:
        raise ConfigError(
            "batch_size must not be larger than the number of samples, or an epoch has no step. "
            f"Received: batch_size={batch_size}, samples={samples}. Use a smaller batch_size, "
            "or drop_remainder=False."
        )
    if samples < size:
        raise ConfigError(
            f"samples must be one per rank or more. Received: samples={samples}, size={size}. "
            "Use fewer ranks or more data."
        )
    if must_be_even and not slices.are_even:
        raise ConfigError(
            "drop_remainder=False needs a last batch that the number of ranks divides, in loops by "
            "hand, with surplus ranks and without callbacks of tfscale. Received: "
            f"samples={samples}, batch_size={batch_size}, last batch={slices.remainder}, "
            f"size={size}. Pass tfscale.callbacks.Synchronize() to fit, or use "
            f"drop_remainder=True or {samples - slices.remainder % size} samples."
        )
    return slices


class StepCount:
    """An integer whose value may change between two epochs of one `fit`.

    Keras reads the number of batches of a data set once, before the first epoch, and uses it for
    the length of the loop and the target of the progress bar. With a plain int, later epochs with
    more steps would silently be cut short; the operators of this object use the present value.
    Sums, differences and whole quotients with an int change with it: Keras 3.16 computes with them
    the number of batches of one of several shards, of which there is one here.

    It holds no reference to the data, because `model.history.params` may keep it.
    """

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]  # equal to an int now, to another later

    def __init__(self, value: int = 0):
        self.value = value

    def set(self, value: int) -> None:
        """Set the value, of the epoch that is served now."""
        self.value = value

    def __add__(self, other: Any) -> Any:
        return _derived(operator.add, self, other)

    def __sub__(self, other: Any) -> Any:
        return _derived(operator.sub, self, other)

    def __floordiv__(self, other: Any) -> Any:
        return _derived(operator.floordiv, self, other)

    def __index__(self) -> int:
        return self.value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)


class _DerivedCount(StepCount):
    """The result of an operator for a count and an int; computed whenever it is read."""

    __slots__ = ("_operand", "_operator", "_other")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, function: Any, count: StepCount, other: int):
        self._operator, self._operand, self._other = function, count, other

    @property
    def value(self) -> int:  # type: ignore[override]
        return self._operator(self._operand.value, self._other)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no value of its own to set
        return _DerivedCount, (self._operator, self._operand, self._other)


def _derived(function: Any, count: StepCount, other: Any) -> Any:
    """The result of an operator: a count that follows, for an int; else a plain number."""
    if isinstance(other, int):
        return _DerivedCount(function, count, other)
    return function(count.value, other)


def _add_operators() -> None:
    """Add the operators of int to StepCount."""

    def forward(function: Any) -> Any:
        return lambda self, *others: function(self.value, *others)

    def backward(function: Any) -> Any:
        return lambda self, other: function(other, self.value)

    comparisons = ("eq", "lt", "le", "gt", "ge")
    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    for name in {"neg", *comparisons, *arithmetic} - {"add", "sub", "floordiv"}:
        setattr(StepCount, f"__{name}__", forward(getattr(operator, name)))
    for name in arithmetic:
        setattr(StepCount, f"__r{name}__", backward(getattr(operator, name)))
    for function in (float, bool, repr, format):
        setattr(StepCount, f"__{function.__name__}__", forward(function))


_add_operators()
numbers.Integral.register(StepCount)
