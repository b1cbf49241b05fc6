"""Sources of global batches: arrays in memory, and datasets of records (files, TFRecords)."""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.data.slices import BatchSlices, epoch_order
from tfscale.internals.datasets import drawn_with, inputs_of, is_unordered
from tfscale.native.cores import count_cores

logger = logging.getLogger("tfscale")


# Arrays

_N_COMPARED = 64  # values of a sample
_STRINGS = "USTO"  # kinds of dtypes; objects must be strings


class ArraySource:
    """Nested arrays with one common first axis, see `GlobalBatches`; served in any order.

    Holds references to the arrays, not copies; memory-mapped arrays are read slice by slice.
    """

    def __init__(self, x: Any, y: Any, sample_weight: Any, is_shuffled: bool):
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
                "x, y and sample_weight must have the same length (their first axis counts the "
                f"samples). Received: lengths={lengths}."
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
    values = np.ravel(np.asarray(sample))
    # Evenly spaced: the first values may be a border common to all pictures.
    chosen = np.linspace(0, values.size - 1, min(values.size, _N_COMPARED)).astype(int)
    values = values[chosen]
    is_number = values.dtype.kind in "fiub"
    return values.astype(np.float64).tolist() if is_number else repr(values.tolist())


def _take(array: np.ndarray, rows: Any) -> Any:
    """Return some rows; floats are cast to `keras.config.floatx()`, as `fit` does with arrays."""
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
            "shape must have a first axis that counts samples, and dtype be numeric or string. "
            f"Received: shape={array.shape}, dtype={array.dtype}. Use GlobalBatches.from_dataset "
            "for ragged or sparse data."
        )
    return array


# Records

_MAX_SHUFFLE_BUFFER = 16384  # records, undecoded and so small: 16k JPEGs of 100 kB are 1.6 GB
_DECODE_STREAM = 1  # separates seeds of decoding from those of the order
_MAX_IDLE_READERS = 2
_KEPT_STEPS = 2  # Keras reads two batches to learn their shapes, before the first epoch


def _never_ends(dataset: tf.data.Dataset) -> bool:
    """Return whether only steps like filter(), flat_map() or unbatch() follow a repeat()."""
    while dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        inputs = inputs_of(dataset)
        if len(inputs) != 1 or "Take" in type(dataset).__name__:
            return False
        dataset = inputs[0]
    return bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)


def _seeds_of_order(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Return the pairs of seeds of all steps that shuffle or draw; ranks compare them.

    One of each pair is TensorFlow's global seed, which users may set differently per rank. A step
    that draws another order on each rank, or in each pass, is refused.
    """
    seeds, steps = [], [dataset]
    while steps:
        step = steps.pop()
        steps.extend(inputs_of(step))
        pair = drawn_with(step)
        if is_unordered(step):
            raise ConfigError(
                "dataset must give the same order on all ranks and in each pass. Received: a "
                f"{type(step).__name__} with deterministic=False. Leave that argument out."
            )
        if pair == (0, 0):
            raise ConfigError(
                "dataset must give the same order on all ranks and in each pass. Received: a "
                f"{type(step).__name__} that draws another one. Remove shuffle(), use "
                "list_files(..., shuffle=False), and let GlobalBatches shuffle: shuffle_buffer=. "
                "To split data, use shuffle(n, seed=1, reshuffle_each_iteration=False)."
            )
        if pair is not None:
            seeds.append(pair)
    return seeds


class RecordSource:
    """Records of a dataset: all ranks shuffle all of them undecoded, one rank decodes each.

    For the arguments see `GlobalBatches.from_dataset`. Creating the source reads nothing.
    """

    def __init__(
        self, dataset: Any, size: int | None, shuffle_buffer: int | None, decode: Callable | None
    ):
        if not isinstance(dataset, tf.data.Dataset):
            raise ConfigError(
                f"dataset must be a tf.data.Dataset. Received: {type(dataset).__name__}. "
                "Pass arrays to GlobalBatches(x, y, ...)."
            )
        self._seeds = _seeds_of_order(dataset)
        cardinality = int(dataset.cardinality())
        is_counted = size is None and cardinality == tf.data.UNKNOWN_CARDINALITY
        if cardinality == tf.data.INFINITE_CARDINALITY or (is_counted and _never_ends(dataset)):
            raise ConfigError(
                "dataset must end: one pass over it is one epoch. Received: an infinite dataset. "
                "Remove repeat()."
            )
        if size is not None and 0 <= cardinality < size:
            raise ConfigError(
                "size must not be larger than the dataset. "
                f"Received: size={size}, records={cardinality}. Leave size out to use all."
            )
        self._dataset = dataset
        self._samples = size if size is not None else max(cardinality, -1)
        self._shuffle_buffer = shuffle_buffer
        self._decode = decode

    @property
    def samples(self) -> int:
        """Number of records of an epoch; counted by reading the dataset once if unknown."""
        if self._samples < 0:
            start = time.monotonic()
            logger.info("Counting the records of a dataset whose length is not known.")
            count = self._samples = int(self._dataset.reduce(np.int64(0), lambda n, *_: n + 1))
            text = "Counted %d records in %.1f s; pass size=%d to from_dataset to skip this."
            logger.info(text, count, time.monotonic() - start, count)
        return self._samples

    def probe(self) -> list[Any]:
        """Return the spec of records, the seeds of their order, and a digest of the first record.

        The digest covers only strings (names, serialized records), because numbers may be random.
        No record is read of a dataset that shuffles, because that would fill its buffer.
        """
        spec = self._dataset.element_spec
        has_text = any(getattr(s, "dtype", None) == tf.string for s in tf.nest.flatten(spec))
        first = self._dataset.take(1) if has_text and not self._seeds else ()
        texts = [
            hashlib.blake2b(repr(part.numpy()).encode(), digest_size=8).hexdigest()
            for record in first
            for part in tf.nest.flatten(record, expand_composites=True)
            if part.dtype == tf.string
        ]
        return [repr(spec), repr(self._seeds), *texts]

    def open_epoch(self, seed: int, epoch: int, slices: BatchSlices) -> Callable[[int], Any]:
        """Return the function that reads this rank's slice of a step of one epoch."""
        records = self._dataset.take(slices.samples)
        buffer = self._shuffle_buffer
        if buffer is None:
            buffer = min(slices.samples, _MAX_SHUFFLE_BUFFER)
        if buffer > 1:
            records = _shuffle(records, buffer, np.random.SeedSequence([seed, epoch]))
        decode = self._decode
        if decode is not None and "seed" in inspect.signature(decode).parameters:
            decode = _with_seeds(decode, np.random.SeedSequence([seed, epoch, _DECODE_STREAM]))
            records = records.enumerate()
        return _EpochReader(_own_records(records, slices), decode, slices).read


def _with_seeds(decode: Callable, seeds: np.random.SeedSequence) -> Callable:
    """Return a function (position in the epoch, record) that calls `decode` with a seed."""
    epoch_seed = np.int64(seeds.generate_state(1)[0])

    def decode_at(position: tf.Tensor, record: Any) -> Any:
        values = record if isinstance(record, tuple) else (record,)
        return decode(*values, seed=tf.stack([epoch_seed, position]))

    return decode_at


def _shuffle(dataset: tf.data.Dataset, buffer: int, seeds: np.random.SeedSequence) -> Any:
    """Shuffle in an order that depends on `seeds` only.

    `Dataset.shuffle` also uses TensorFlow's global seed, which users may set differently per rank.
    The function given to `flat_map` has its own graph, and so its own global seed.
    """
    global_seed, seed = (int(word) for word in seeds.generate_state(2) >> 1)

    def shuffled(_: Any) -> tf.data.Dataset:
        tf.random.set_seed(global_seed)
        return dataset.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)

    return tf.data.Dataset.from_tensors(0).flat_map(shuffled)


def _own_records(records: tf.data.Dataset, slices: BatchSlices) -> tf.data.Dataset:
    """Return the dataset of this rank's records, in order."""
    full = slices.full_batches * slices.batch_size
    records = records.take(full + slices.remainder)
    if slices.size == 1:
        return records
    local = slices.local_batch_size
    starts, counts = [slices.rank * local, 0], [local, 0]  # in a full batch, in the last one
    if slices.remainder:
        first, last = slices.bounds(slices.full_batches)
        starts[1], counts[1] = first - full, last - first

    def slice_of(batch: tf.Tensor, window: Any) -> tf.data.Dataset:
        kind = tf.cast(batch >= slices.full_batches, tf.int32)
        piece = tf.data.Dataset.zip(window).skip(tf.constant(starts, tf.int64)[kind])
        return piece.take(tf.constant(counts, tf.int64)[kind])

    # One function call per batch; one per record (filter) would cost 50 us each on every rank.
    return records.window(slices.batch_size).enumerate().flat_map(slice_of)


class _EpochReader:
    """Random access by step to a stream that is cheap to read only in order; thread-safe.

    Keras may read one epoch from several generators (shape probing, an evaluation on the training
    data, an interrupted pass). The content depends on the step only, so any open reader whose next
    step is the requested one is used.
    """

    def __init__(self, records: tf.data.Dataset, decode: Callable | None, slices: BatchSlices):
        self._records = records
        self._decode = decode
        self._slices = slices
        self._lock = threading.Lock()
        self._idle: dict[int, Iterator] = {}  # by their next step
        self._first_batches: dict[int, tuple] = {}

    def read(self, step: int) -> tuple:
        """Return this rank's slice of a step as (x,), (x, y) or (x, y, sample_weight)."""
        start, stop = self._slices.bounds(step)  # raises if the step is outside the epoch
        with self._lock:
            if step in self._first_batches:
                return self._first_batches[step]
            reader = self._idle.pop(step, None) or self._open(step)
            batch = self._next(reader, step, stop - start)
            if step < _KEPT_STEPS:
                self._first_batches[step] = batch
            if step + 1 < self._slices.global_batches:
                self._idle[step + 1] = reader
            if len(self._idle) > _MAX_IDLE_READERS:
                del self._idle[next(iter(self._idle))]  # the oldest
            return batch

    def _open(self, step: int) -> Iterator:
        batch_size = self._slices.local_batch_size
        dataset = self._records.skip(step * batch_size)
        if self._decode is not None:
            dataset = dataset.map(self._decode, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)
        options = tf.data.Options()
        options.deterministic = True  # of `map`, too
        # Keras waits for batches in a TensorFlow thread; in its pool, decoding would wait for it.
        options.threading.private_threadpool_size = count_cores()
        with tf.device("CPU:0"):
            return iter(dataset.with_options(options))

    def _next(self, reader: Iterator, step: int, length: int) -> tuple:
        batch = next(reader, None)
        if batch is None or any(part.shape[0] != length for part in tf.nest.flatten(batch)[:1]):
            raise ConfigError(
                "dataset must give the same number of records in every epoch. Received: it "
                f"ended at step {step + 1} of {self._slices.global_batches}, with "
                f"size={self._slices.samples}. Correct size, or leave it out."
            )
        parts = batch if isinstance(batch, tuple) else (batch,)
        if not 1 <= len(parts) <= 3:
            raise ConfigError(
                "records must be x, (x, y) or (x, y, sample_weight) once decoded. Received: a "
                f"tuple of {len(parts)}. Change decode."
            )
        return parts


# Weights of surplus ranks.


def weighted(read: Callable[[int], Any], rank: int, active: int, size: int) -> Callable[[int], Any]:
    """Return a reader with sample weights: the mean over all ranks is that over the active ones.

    Weights of the first `active` ranks are multiplied by size / active, those of the others by 0.
    If `read` returns no weights, there is one for the whole batch, which suits losses of any shape:
    Keras broadcasts weights against the last axes of a loss.
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
        return x, y, np.array([factor], dtype=keras.config.floatx())

    return read_weighted
