"""Arrays in memory (or memory-mapped) as a source of global batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.data.slices import BatchSlices, epoch_order

_N_COMPARED = 64  # values of a sample
_STRINGS = "USTO"  # kinds of dtypes; of objects only strings are let in


class ArraySource:
    """Nested arrays with one common first axis, served in any order.

    Owns references to the arrays, no copies; memory-mapped arrays are read slice by slice.
    """

    def __init__(self, x: Any, y: Any, sample_weight: Any, is_shuffled: bool):
        """Look the arrays over.

        Args:
            x: Array of shape (samples, ...), of numbers or strings, a list of strings, or nested
                dict, tuple, list of these.
            y: The same for the targets, or None.
            sample_weight: The same for the weights, or None; needs `y`.
            is_shuffled: Take the samples in another order each epoch.

        Raises:
            ConfigError: Something is no array, or the lengths differ.
        """
        if sample_weight is not None and y is None:
            raise ConfigError(
                "sample_weight weights the loss against targets. Received: y=None. Pass y as well."
            )
        parts = [part for part in (x, y, sample_weight) if part is not None]
        self._parts = tuple(_as_arrays(part) for part in parts)
        self._is_shuffled = is_shuffled
        lengths = [len(array) for array in keras.tree.flatten(self._parts)]
        if len(set(lengths)) != 1:
            raise ConfigError(
                "All arrays of x, y and sample_weight must have the same length (their first "
                f"axis counts the samples). Received: lengths={lengths}."
            )
        self.samples = lengths[0]

    def probe(self) -> list[Any]:
        """Return parts of the first, the middle and the last sample."""
        rows = (0, self.samples // 2, self.samples - 1)
        return [_part_of(array[row]) for row in rows for array in keras.tree.flatten(self._parts)]

    def open_epoch(self, seed: int, epoch: int, slices: BatchSlices) -> Callable[[int], Any]:
        """Return the function that reads this rank's slice of a step of one epoch."""
        order = epoch_order(seed, epoch, self.samples) if self._is_shuffled else None

        def read(step: int) -> tuple:
            start, stop = slices.bounds(step)
            rows = slice(start, stop) if order is None else order[start:stop]
            return keras.tree.map_structure(lambda array: _take(array, rows), self._parts)

        return read


def _part_of(sample: Any) -> list[float] | str:
    """Return some values of a sample: numbers, or the text of anything else."""
    values = np.ravel(np.asarray(sample))
    # Spread out: the first ones may be a border that all pictures have.
    chosen = np.linspace(0, values.size - 1, min(values.size, _N_COMPARED)).astype(int)
    values = values[chosen]
    is_number = values.dtype.kind in "fiub"
    return values.astype(np.float64).tolist() if is_number else repr(values.tolist())


def _take(array: np.ndarray, rows: Any) -> Any:
    """Return some rows, floats as `keras.config.floatx()` as `fit` on arrays gives them."""
    batch = array[rows] if isinstance(rows, slice) else np.take(array, rows, axis=0)
    if batch.dtype.kind in _STRINGS:
        return tf.constant(batch.astype(object), tf.string)
    is_float = np.issubdtype(batch.dtype, np.floating)
    return batch.astype(keras.config.floatx(), copy=False) if is_float else batch


def _as_arrays(structure: Any) -> Any:
    """Return the structure with numpy arrays as leaves and tuples for lists."""
    if isinstance(structure, dict):
        return {key: _as_arrays(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        if structure and all(isinstance(value, (str, bytes)) for value in structure):
            return np.array(structure, dtype=object)
        return tuple(_as_arrays(value) for value in structure)
    if not hasattr(structure, "shape"):
        raise ConfigError(
            "x, y and sample_weight must be arrays, lists of strings, or dict, tuple, list of "
            f"these. Received: {type(structure).__name__}. Convert it with numpy.asarray, or use "
            "GlobalBatches.from_dataset for streams of records."
        )
    array = np.asarray(structure)
    is_other = array.dtype == object and not all(
        isinstance(value, (str, bytes)) for value in array.flat
    )
    if array.ndim == 0 or is_other:
        raise ConfigError(
            "Arrays must have a first axis that counts the samples and a numeric or string type. "
            f"Received: shape={array.shape}, dtype={array.dtype}. Use "
            "GlobalBatches.from_dataset for ragged or sparse data."
        )
    return array
