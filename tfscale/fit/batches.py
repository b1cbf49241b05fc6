"""Batches that all ranks read: made in an order of their own, by rows, and compared between ranks.

Every rank reads the same batches under `tfscale.distribute`, and where those of a dataset grow.
`serve_weighed` serves slices of `GlobalBatches` as rows of such batches, which may be uneven.
Under `tfscale.distribute` the maps of a dataset run on the rank's rows only, where its steps allow
(`RowPipelines`). A digest of all batches so far is kept in a variable. The first batches of a `fit`
are compared before they are computed; then 32 signs that follow from the digest are sent with the
first gradients of each step, in the same message. The batches of `evaluate` and `predict` are
compared when these end.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import collectives, objects, runtime
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.batch_shares import Rider, RowsOfBatch
from tfscale.internals.datasets import GENERATOR, Step, in_own_memory, iterate_in_order, steps_of
from tfscale.internals.keras import serve_joined
from tfscale.internals.row_maps import RowMaps, UnmovedError

logger = logging.getLogger("tfscale")

_ARGUMENTS = ("x", "y", "sample_weight")
_COMPARED_BATCHES = 2  # of each `fit`, before they are computed
_N_SIGNS = 32
_FACTOR = (
    -7046029254386353131
)  # odd, so products keep all bits: 2^64 / golden ratio, as a signed one
_ON_ROWS = "Each rank prepares only its own rows of a dataset, before its maps (--decode rows)."
_STATELESS = (
    "Put random layers into the model, or draw with tf.image.stateless_* or tf.random.stateless_* "
    "from a seed for each element, as Dataset.enumerate() and Dataset.random(seed) give it"
)
_GENERATOR = (
    "Let the generator give the same on each rank: draw with np.random.default_rng(seed), and sort "
    "the names of files."
)


# Pipelines whose elements depend on time.


class OrderedPipelines:
    """Iterators over datasets that give the same elements in each run."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, list[Step]] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()

    def iterate(self, iterate: Any, dataset: Any) -> Any:
        """Return an iterator over a dataset; `iterate` is TensorFlow's `__iter__`."""
        if not tf.executing_eagerly():
            return iterate(dataset)
        raced = [step for step in self.steps_of(dataset) if step.depends_on_time]
        if not raced:
            return iterate(dataset)
        self._tell(raced[0])
        return iterate_in_order(iterate, dataset)

    def steps_of(self, dataset: Any) -> list[Step]:
        """Return the steps of a dataset, read once."""
        if dataset not in self._known:
            self._known[dataset] = steps_of(dataset)
        return self._known[dataset]

    def _tell(self, step: Step) -> None:
        if runtime.rank() > 0 or step.name in self._told:
            return
        self._told.add(step.name)
        logger.warning(
            "%s of a dataset %s: two runs of one process differ, too. It is computed in one order, "
            "as after tf.config.experimental.enable_op_determinism(), which is slower. %s.",
            step.name,
            _why_raced(step),
            _STATELESS if step.draws or step.writes else "Leave deterministic=False out",
        )


def _why_raced(step: Step) -> str:
    if step.draws and step.is_parallel:
        return f"draws random numbers ({', '.join(step.draws)}) in parallel calls"
    if step.writes:
        return f"changes variables ({', '.join(step.writes)}) while elements are prefetched"
    return "has no order (deterministic=False)"


# Pipelines whose maps run on this rank's rows.


class RowPipelines:
    """Datasets of batches of which each rank maps its own rows, where their steps allow."""

    def __init__(self) -> None:
        # Those of rows, None if whole batches are needed, and their fingerprints.
        self._known: weakref.WeakKeyDictionary[Any, tuple[tf.data.Dataset | None, int]]
        self._known = weakref.WeakKeyDictionary()
        self._told: set[str] = set()
        self._is_off = False

    @contextlib.contextmanager
    def switched_off(self, is_off: bool) -> Iterator[None]:
        """Serve whole batches within a block if `is_off`."""
        before, self._is_off = self._is_off, is_off
        try:
            yield
        finally:
            self._is_off = before

    def serve(self, get: Callable[[Any], Any], adapter: Any) -> Any:
        """Return the dataset of a Keras adapter, or that of this rank's rows. Collective.

        Args:
            get: Keras's method of the adapter, which returns the dataset that it was given.
            adapter: The adapter.
        """
        dataset = get(adapter)
        if self._is_off or not isinstance(dataset, tf.data.Dataset):
            return dataset
        if dataset not in self._known:
            self._known[dataset] = self._on_own_rows(dataset)
        served, fingerprint = self._known[dataset]
        by_rank = objects.allgather_object(fingerprint, name="maps of a dataset")
        if by_rank.count(fingerprint) != len(by_rank):
            # If the batches differ, too, their comparison tells why.
            self._warn("names of files, or constants or tables of its maps, differ between ranks")
            return dataset
        if served is None:
            return dataset
        self._tell(logging.INFO, _ON_ROWS)
        return served

    def _on_own_rows(self, dataset: tf.data.Dataset) -> tuple[tf.data.Dataset | None, int]:
        """Return a dataset of this rank's rows, None if there is none, and its fingerprint."""
        try:
            maps = RowMaps.of(dataset)
            if maps is not None:
                served = maps.on_chosen_rows(_own_rows, _n_rows, _joined)
                return served, maps.fingerprint()
        except UnmovedError as error:
            self._warn(str(error))
        except (AttributeError, TypeError, ValueError, tf.errors.OpError) as error:
            self._warn(f"its steps cannot be read ({type(error).__name__}: {error})")
        return None, 0

    def _warn(self, reason: str) -> None:
        self._tell(
            logging.WARNING,
            f"Each rank prepares whole batches of a dataset, not only its rows: {reason}. See "
            "'Unchanged scripts' in the documentation.",
        )

    def _tell(self, level: int, text: str) -> None:
        """Log a text on rank 0, once."""
        if runtime.rank() == 0 and text not in self._told:
            self._told.add(text)
            logger.log(level, "%s", text)


def _own_rows(batch: Any) -> tuple[Any, dict[str, tf.Tensor]]:
    """Return the elements of a batch that this rank maps, and what describes the whole batch."""
    share = shares.share_of(batch)
    assert share is not None  # a batch has rows
    digest = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(batch):
        digest = digest * _FACTOR + digest_of(leaf)
    return shares.cut(batch, share), {"digest": digest, "total": tf.cast(share.total, tf.int64)}


def _n_rows(total: int) -> int:
    share = shares.share_of(np.zeros((total, 0)))
    assert share is not None
    return int(share.computed)


def _joined(rows: Any, notes: dict[str, tf.Tensor], total: int | None) -> RowsOfBatch:
    places = tf.zeros([notes["total"] if total is None else total, 0])
    return RowsOfBatch(rows, notes["digest"], places)


def cause_of(data: Any) -> str:
    """Return why ranks may read other batches of some data, and what to do."""
    if isinstance(data, tf.data.Dataset):
        return _cause_in(steps_of(data))
    if isinstance(data, keras.utils.PyDataset):
        if data.workers > 1 or data.use_multiprocessing:
            return (
                f"{type(data).__name__} has {data.workers} workers, which draw random numbers in "
                "any order. Draw in __getitem__ with np.random.default_rng([seed, index]), or use "
                "workers=1."
            )
        return (
            f"Let {type(data).__name__}.__getitem__ depend on its index alone: draw with "
            "np.random.default_rng([seed, index]), and sort the names of files."
        )
    if hasattr(data, "__next__"):
        return _GENERATOR
    return (
        "Shuffle by a fixed seed, and read the same files in the same order on every rank: "
        "os.listdir, glob and sets of strings have an order of their own on each."
    )


def _cause_in(steps: list[Step]) -> str:
    for step in steps:
        if step.name == GENERATOR:
            return _GENERATOR
        if step.calls_python:
            how = "Python in parallel" if step.is_parallel else "Python"
            return (
                f"{step.name} calls {how}: draw there with np.random.default_rng(seed) for a seed "
                "that is a part of the element, or leave num_parallel_calls out and seed NumPy on "
                "every rank alike."
            )
    for step in steps:
        if step.draws or step.writes:
            ops = ", ".join(dict.fromkeys((*step.draws, *step.writes)))
            return f"{step.name} draws random numbers: {ops}. {_STATELESS}."
    return cause_of(None)


# Slices that are rows of a global batch.


def serve_weighed(epochs: Any, data: GlobalBatches) -> None:
    """Serve slices in a running `fit` with the rows of their batches, by which ranks are weighed.

    Without effect if the `fit` serves them so already.

    Args:
        epochs: Keras's iterator of epochs.
        data: The data of the `fit`.
    """
    if data.weighs_in(epochs):
        return
    data.weigh_in(epochs)
    serve_joined(epochs, _rows_of_batch, _spec_of_rows)


def _rows_of_batch(rows: Any, step: int, total: int) -> RowsOfBatch:
    return RowsOfBatch(in_own_memory(rows), np.int64(step), np.zeros((total, 0), np.float32))


def _spec_of_rows(spec: Any) -> RowsOfBatch:
    return RowsOfBatch(spec, tf.TensorSpec([], tf.int64), tf.TensorSpec([None, 0], tf.float32))


# Digests.


def digest_of(leaf: tf.Tensor) -> tf.Tensor:
    """Return an int64 that differs for tensors that differ in a bit or a place.

    The fingerprint of each row counts with a weight of its place. Numbers are read once and not
    copied.
    """
    if leaf.dtype in (tf.variant, tf.resource):
        return tf.constant(0, tf.int64)
    if not leaf.shape.rank:
        leaf = tf.reshape(leaf, [1, -1])
    rows = tf.bitcast(tf.fingerprint(leaf), tf.int64)
    places = tf.range(tf.size(rows, tf.int64), dtype=tf.int64)
    return tf.reduce_sum(rows * (places * 2 + 1)) * _FACTOR + tf.size(leaf, tf.int64)


def _signs(digests: tf.Tensor) -> tf.Tensor:
    """Return a vector of 1 and -1, other ones for other digests but with a chance of 2^-32."""
    mixed = tf.reduce_sum(digests * tf.constant([1, 3, 5], tf.int64) * _FACTOR)
    mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, 29)) * _FACTOR
    bits = tf.bitwise.right_shift(mixed, tf.range(63 - _N_SIGNS, 63, dtype=tf.int64))
    return tf.cast(tf.bitwise.bitwise_and(bits, 1) * 2 - 1, tf.float32)


class BatchComparison:
    """The batches that a model was given on this rank, to be the same on all ranks."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            # Of each argument; and batches so far.
            self._digests = tf.Variable(tf.zeros([3], tf.int64), trainable=False)
            self._n_batches = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._left = tf.Variable(_COMPARED_BATCHES, trainable=False, dtype=tf.int32)
        self._data: Any = None  # of the call that runs
        self._method = ""
        self._epoch: tuple[int, int] | None = None  # that runs, and the batches before it
        self._named = _ARGUMENTS

    def expect(self, data: Any, method: str) -> None:
        """Begin a call of a method with some data: its first batches are compared at once."""
        is_kept = isinstance(data, tf.data.Dataset | keras.utils.PyDataset)
        # Keras holds it while the call runs. Of a generator only its kind is needed.
        kind = iter(()) if hasattr(data, "__next__") else None
        self._data = weakref.ref(data) if is_kept else lambda: kind
        self._method, self._epoch = method, None
        self._digests.assign(tf.zeros([3], tf.int64))
        self._n_batches.assign(0)
        self._left.assign(_COMPARED_BATCHES)

    def begin_epoch(self, epoch: int, first_step: int) -> None:
        """Let errors count batches from a step of an epoch on, which comes next."""
        self._epoch = epoch, int(self._n_batches) - first_step

    def expect_one(self, method: str) -> None:
        """Begin a call of a method that takes one batch, such as `train_on_batch`."""
        if self._method != method:
            self.expect(None, method)

    def __call__(self, batch: Any) -> Rider:
        """Take a batch in, in its step; return what the first message of the step compares."""
        with tf.device("CPU:0"):
            of_batch = self._digests_of(batch)
            digests = self._digests.assign(self._digests * _FACTOR + of_batch)
            n_batches = self._n_batches.assign_add(1)

        def refuse() -> tf.Tensor:
            return self._compare(digests, n_batches)

        def compare() -> tf.Tensor:
            with tf.control_dependencies([self._left.assign_sub(1)]):
                return refuse()

        if tf.executing_eagerly():
            if int(self._left) > 0:
                compare()
            return Rider(_signs(digests), refuse)
        compared = tf.cond(self._left > 0, compare, lambda: tf.constant(0))
        with tf.control_dependencies([compared]):  # the step waits for the signs
            return Rider(tf.identity(_signs(digests)), refuse)

    def require_same(self, batch: Any) -> None:
        """Require that the batch that comes next is the same on all ranks. Collective."""
        self._compare(self._digests_of(batch), self._n_batches + 1)

    def _digests_of(self, batch: Any) -> tf.Tensor:
        """Return a digest of each argument, shape [3]."""
        if isinstance(batch, RowsOfBatch):
            self._named = ("data", *_ARGUMENTS[1:])
            return tf.stack([batch.digest, *[tf.constant(0, tf.int64)] * 2])
        parts = batch if isinstance(batch, tuple) else (batch,)
        self._named = _ARGUMENTS if isinstance(batch, tuple) else ("data", *_ARGUMENTS[1:])
        digests = [self._digest_of_part(part) for part in parts[: len(_ARGUMENTS)]]
        digests += [tf.constant(0, tf.int64)] * (len(_ARGUMENTS) - len(digests))
        return tf.stack(digests)

    def _digest_of_part(self, part: Any) -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for leaf in tf.nest.flatten(part, expand_composites=True):
            if leaf is not None and not isinstance(leaf, str):
                total = total * _FACTOR + digest_of(tf.convert_to_tensor(leaf))
        return total

    def _compare(self, digests: tf.Tensor, n_batches: tf.Tensor) -> tf.Tensor:
        """Gather the digests of all ranks, and raise an error if they differ. Collective."""
        digests_here = tf.concat([digests, n_batches[tf.newaxis]], 0)
        digests_by_rank = collectives.allgather(
            digests_here[tf.newaxis], name="digests of the batch"
        )
        named = self._named
        if tf.executing_eagerly():
            self._refuse_others(named, digests_by_rank.numpy(), self._batch_name(int(n_batches)))
            return tf.constant(0)

        def refuse_others(digests_by_rank: tf.Tensor, n_batches: tf.Tensor) -> int:
            # The mark by which `GuardedStep` recognises errors of the exchange.
            self._refuse_others(
                named, digests_by_rank.numpy(), self._batch_name(int(n_batches)), "TFSCALE_FAILED: "
            )
            return 0

        return tf.py_function(refuse_others, [digests_by_rank, n_batches], tf.int32)

    def _batch_name(self, n_batches: int) -> str:
        """Return the name of the last batch of so many."""
        if self._epoch is None:
            return f"batch {n_batches} of {self._method}"
        epoch, n_before = self._epoch
        return f"batch {n_batches - n_before} of epoch {epoch + 1} of {self._method}"

    def require_equal(self, has_stopped: bool = False) -> None:
        """Require that all batches of the call were the same on all ranks. Collective.

        With `has_stopped` on a rank ranks may have begun other numbers of steps.
        """
        digests_here: np.ndarray = np.append(self._digests.numpy(), self._n_batches.numpy())
        digests_by_rank = objects.allgather_object(
            (digests_here, has_stopped), name=f"batches of {self._method}"
        )
        if not any(stopped for _, stopped in digests_by_rank):
            rows = np.stack([digests for digests, _ in digests_by_rank])
            self._refuse_others(self._named, rows, f"a batch of {self._method}")

    def _refuse_others(
        self, named: tuple[str, ...], digests_by_rank: np.ndarray, batch_name: str, mark: str = ""
    ) -> None:
        """Raise an error unless the rows of digests, one for each rank, are equal."""
        if (digests_by_rank == digests_by_rank[0]).all():
            return
        for name, found in zip((*named, "the number of batches"), digests_by_rank.T, strict=True):
            digests = {rank: digest.tobytes() for rank, digest in enumerate(found)}
            what = f"{mark}{name} in {batch_name}"
            objects.require_equal_values(digests, what, cause_of(self._data()))
