"""GlobalBatches: each rank serves its slice of the batches that one process would see."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras

from tfscale.comm import runtime
from tfscale.comm.warnings import warn_if_unsynchronised, warn_of_evaluation
from tfscale.config import ConfigError, check_integer
from tfscale.data.dataset_batches import DatasetBatches
from tfscale.data.slices import BatchSlices, StepCount, check_slices, count_active
from tfscale.data.sources import ArraySource, RecordSource, weighted
from tfscale.internals.keras import begin_epoch_at, class_weight_to_sample_weights, leave_untuned
from tfscale.internals.stack import KerasPass, current_pass
from tfscale.internals.traits import own_of

logger = logging.getLogger("tfscale")


class OpenEpoch(NamedTuple):
    """One epoch being served: immutable, so that any thread may read any step at any time."""

    seed: int
    number: int
    slices: BatchSlices
    read: Callable[[int], Any]


class GlobalBatches(keras.utils.PyDataset):
    """Data for `fit`, `evaluate` and `predict` on any number of ranks.

    Together, n ranks see exactly the batches that one process would see: the order of an epoch is a
    permutation drawn from (seed, epoch), and rank r serves the r-th of n equal slices of each
    batch. Nothing is communicated. `evaluate` returns metrics of this rank's slices unless
    `Synchronize` or `MetricAverageCallback` is among its callbacks; `predict` returns the rows of
    the slices, and requires shuffle=False.

    ```python
    data = GlobalBatches(x, y, batch_size=256, seed=1)
    model.fit(data, epochs=90, validation_data=GlobalBatches(
        x_val, y_val, batch_size=256, shuffle=False))
    ```

    The epoch number continues over several `fit` calls and respects `initial_epoch`; an interrupted
    epoch begins again. Evaluation, prediction and `for batch in data` read the present epoch's
    batches and never advance it. `batch_size` may be set between epochs of one `fit`: the next
    epoch uses it, and Keras's progress bar follows.

    If batches differ in size (`drop_remainder=False`), losses and metrics are means over all
    samples. The exception are the losses per output that Keras shows for models with several
    outputs: they are means over batches. In a `fit` with a callback of tfscale, ranks may also have
    different numbers of rows of the last batch, or none: the last step weighs ranks by their rows.
    Results equal those of one process, also with BatchNormalization and Dropout.

    Examples:
        >>> tfscale.init()
        >>> x, y = np.arange(10.0).reshape(10, 1), np.arange(10)
        >>> data = tfscale.data.GlobalBatches(x, y, batch_size=4, seed=1)
        >>> [tuple(inputs.shape) for inputs, labels in data]  # (2, 1) on each of two ranks
        [(4, 1), (4, 1)]
        >>> data = tfscale.data.GlobalBatches(x, y, batch_size=4, shuffle=False)  # for evaluation
        >>> [len(labels) for inputs, labels in data]
        [4, 4, 2]
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_remainder: bool | None = None,
        sample_weight: Any = None,
    ) -> None:
        """Serve slices of arrays.

        Args:
            x: Array of shape (samples, ...), or nested dict, tuple, list of such arrays. Each rank
                passes all samples (memory-mapped files are not read as a whole). Arrays and lists
                of strings are served as string tensors.
            y: The same for the targets.
            batch_size: Samples of one step over all ranks; a multiple of the number of ranks.
            seed: Non-negative, the same on all ranks.
            shuffle: Draw another order in each epoch. `fit`'s own `shuffle` is ignored.
            drop_remainder: Leave out the samples after the last full batch (different ones in
                each epoch). None means True with `shuffle`, and False without: each sample then
                counts once over all ranks. Outside of `fit` a rank whose last slice is empty
                serves one step less.
            sample_weight: Array of shape (samples,), or a structure like `y`.

        Raises:
            ConfigError: Arguments do not fit each other, the data or the number of ranks. If the
                data is created before `init()`, the number is checked at the first use.
        """
        source = ArraySource(x, y, sample_weight, shuffle)
        self._set_up(source, shuffle, drop_remainder, batch_size, seed)

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        batch_size: int,
        size: int | None = None,
        shuffle_buffer: int | None = None,
        seed: int = 0,
        decode: Callable[..., Any] | None = None,
        drop_remainder: bool | None = None,
    ) -> GlobalBatches:
        """Serve slices of a dataset of records, such as those of files.

        Each rank shuffles all *undecoded* records in the same order, and decodes only its slice.

        Args:
            dataset: `tf.data.Dataset` of single records (TFRecords, file names, tensors):
                finite, the same on all ranks, not shuffled (or once, by a fixed seed).
            batch_size: Samples of one step over all ranks; a multiple of the number of ranks.
            size: Number of records of an epoch; None for all, counted by reading once if unknown.
            shuffle_buffer: Number of records among which the next one is drawn; None for all, up
                to 16384; 0 to keep the order (validation).
            seed: Non-negative, the same on all ranks.
            decode: Maps a record to x, (x, y) or (x, y, sample_weight), in the dataset's graph.
                A parameter `seed` receives an int64 tensor (2,) for `tf.random.stateless_*`; it
                differs by record and epoch, and does not depend on the number of ranks.
            drop_remainder: As for arrays; None means True unless `shuffle_buffer` is 0 or 1.

        Returns:
            The data, to be passed to `fit`.

        Raises:
            ConfigError: As for arrays; also if the dataset is infinite, or shuffles in another
                order in each pass.
        """
        if size is not None:
            size = check_integer("size", size, 1)
        if shuffle_buffer is not None:
            shuffle_buffer = check_integer("shuffle_buffer", shuffle_buffer, 0)
        source = RecordSource(dataset, size, shuffle_buffer, decode)
        is_shuffled = shuffle_buffer is None or shuffle_buffer > 1
        self = cls.__new__(cls)
        self._set_up(source, is_shuffled, drop_remainder, batch_size, seed)
        return self

    def _set_up(
        self,
        source: ArraySource | RecordSource,
        is_shuffled: bool,
        drop_remainder: bool | None,
        batch_size: int,
        seed: int,
    ) -> None:
        super().__init__()
        self._source = source
        self._is_shuffled = is_shuffled
        self._drop_remainder = is_shuffled if drop_remainder is None else drop_remainder
        self._seed, self._number = check_integer("seed", seed, 0), 0
        self.has_surplus_ranks = False  # whether a part of the ranks may share a batch
        self._kept: tuple[int, bool] | None = None  # batch size and surplus ranks before `fit`
        self._steps = StepCount()  # of this rank, in the epoch being served
        self._common_steps = StepCount()  # of all ranks, where slices are weighed
        self._open: OpenEpoch | None = None  # the epoch being served, also to tf.data's threads
        self._training: weakref.ref[Any] | None = None  # adapter of the training pass, or self
        self._weighing: weakref.ref[Any] | None = None  # Keras's epochs of a `fit`, see `weigh_in`
        self._rank_and_size: tuple[int, int] | None = None  # set by tests only
        self.batch_size = batch_size

    # Settings that may change between epochs.

    @property
    def batch_size(self) -> int:
        """Samples of one step over all ranks.

        Set it to the same value on all ranks. Inside `fit` it applies to the next epoch; if set in
        a callback's `on_epoch_begin`, to the epoch that begins; for data that is not trained on, to
        the next evaluation. Outside of `fit` it applies at once.
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        value = check_integer("batch_size", value, 1)
        is_put_back = self._kept is not None and current_pass().caller is None
        if is_put_back:  # what an interrupted `fit` has left ends here
            self.put_back_settings()
        if self._is_ready():
            self._slices(value)
        self._batch_size = value
        self._refresh_if_idle()

    @property
    def epoch(self) -> int:
        """Number of the training epoch that runs, or comes next; it determines the order."""
        return self._number

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._number = check_integer("epoch", value, 0)
        self._refresh_if_idle()

    @property
    def samples(self) -> int:
        """Number of samples over all ranks."""
        return self._source.samples

    def steps_for(self, batch_size: int) -> int:
        """Return the number of steps of a training epoch with another batch size.

        Raises:
            ConfigError: That batch size cannot be used.
        """
        return self._slices(batch_size).global_batches

    def state(self) -> dict[str, int]:
        """Return the state that determines all later batches, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "batch_size": self.batch_size,
            "seed": self._seed,
            "samples": self.samples,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Continue where `state()` was taken, also with another number of ranks.

        Raises:
            ConfigError: The state belongs to data of another length, or its batch size
                does not suit the number of ranks.
        """
        if state["samples"] != self.samples:
            raise ConfigError(
                "state must come from the same data. Received: "
                f"state['samples']={state['samples']}, samples={self.samples}. Train without the "
                "state, or with its data."
            )
        self._seed = check_integer("seed", state["seed"], 0)
        self._number = check_integer("epoch", state["epoch"], 0)
        self.batch_size = state["batch_size"]

    # Called by Keras.

    @property
    def num_batches(self) -> StepCount:
        """Number of steps of an epoch on this rank: an integer that follows `batch_size`."""
        caller = current_pass()
        caller.keep_order()
        self._leave_broken_fit(caller)
        self._current_epoch()
        # `fit` asks for its own data before its epochs, and in these for that of validation.
        is_trained_on = caller.caller == "fit" and caller.epoch is None
        return self._common_steps if is_trained_on else self._steps

    @property
    def workers(self) -> int:
        """Always 1: more of Keras's workers would not keep the order of the steps."""
        return 1

    def __len__(self) -> int:
        self._refresh_if_idle()
        return int(self.num_batches)

    def __getitem__(self, index: int) -> Any:
        """Return this rank's slice of global batch `index` of the present epoch."""
        return self._current_epoch().read(index)

    def __iter__(self) -> Iterator[Any]:
        self._refresh_if_idle()
        epoch = self._current_epoch()
        check_slices(epoch.slices, must_be_even=self._is_shuffled)  # which a loop by hand trains on
        return (epoch.read(step) for step in range(epoch.slices.steps))

    def with_totals(self, first_step: int = 0) -> Iterator[tuple[Any, int]]:
        """Yield this rank's slices from some step on, each with the rows of its global batch.

        A rank without rows of the last batch gets one that must not count.
        """
        _, _, slices, read = self._current_epoch()
        for step in range(first_step, slices.global_batches):
            yield read(step), slices.rows(step)

    def on_epoch_begin(self) -> None:
        """Start a pass; a training pass applies changed settings."""
        caller = current_pass()
        caller.keep_order()
        self._leave_broken_fit(caller)
        leave_untuned(caller.epochs)
        if caller.caller == "predict":
            self._require_each_in_order()
        if not caller.is_training:
            warn_of_evaluation(caller)
            # Not if it is the training data: its epoch may be running.
            if caller.fit is None or caller.fit.data is not self:
                self._refresh()
            return
        caller.require_whole_epochs()
        self._number = max(self._number, caller.epoch or 0)
        self._training = weakref.ref(caller.adapter or self)
        self._refresh(must_be_even=caller.fit is not None and not self.weighs_in(caller.epochs))
        if caller.fit is not None:
            warn_if_unsynchronised(caller.fit.model, caller.callbacks)

    def on_epoch_end(self) -> None:
        """End a pass; only the end of the running training pass advances the epoch.

        Keras also calls this at other times: before the first epoch, and before and after
        evaluations. It does not call it if `fit` is stopped in the middle of an epoch.
        """
        caller = current_pass().adapter or self
        if self._training is not None and self._training() is caller:
            self._training = None
            self._number += 1

    def _leave_broken_fit(self, caller: KerasPass) -> None:
        """Put back what an interrupted `fit` has left, unless a callback of this one sets it."""
        callbacks = caller.callbacks if caller.fit is None else caller.fit.callbacks
        if caller.caller is not None and not any(c.sets_batch_size for c in own_of(callbacks)):
            self.put_back_settings()

    def _refresh_if_idle(self) -> None:
        if self._is_ready() and current_pass().caller is None:
            self._refresh()

    # The epoch being served.

    def _current_epoch(self) -> OpenEpoch:
        return self._open or self._refresh()

    def _refresh(self, must_be_even: bool = False) -> OpenEpoch:
        """Open the epoch of the present settings, unless it is being served already."""
        slices = check_slices(self._slices(self._batch_size), must_be_even)
        key = (self._seed, self._number, slices)
        if self._open is None or self._open[:3] != key:
            read = self._source.open_epoch(*key)
            if self.has_surplus_ranks:
                rank, size = self._place()
                read = weighted(read, rank, slices.size, size)
            self._open = OpenEpoch(*key, read)
            self._steps.set(slices.steps)
            self._common_steps.set(slices.global_batches)
        return self._open

    def _slices(self, batch_size: Any) -> BatchSlices:
        """Return this rank's slices of batches of another size, or raise if it cannot be used."""
        batch_size = check_integer("batch_size", batch_size, 1)
        rank, size = self._place()
        if self.has_surplus_ranks:  # they serve slices of others, to take part in every exchange
            size = count_active(batch_size, size)
        slices = BatchSlices(self.samples, batch_size, rank % size, size, self._drop_remainder)
        return check_slices(slices)

    def describe(self) -> tuple[dict[str, int], list[Any]]:
        """Return state and samples, for ranks to compare; raise if ranks cannot share batches."""
        self._slices(self.batch_size)
        return self.state(), self._source.probe()

    def _require_each_in_order(self) -> None:
        """Raise if `predict` would return rows in another order than the data's, or not all."""
        n_dropped = self.samples % self.batch_size if self._drop_remainder else 0
        if self._is_shuffled or n_dropped:
            order = "shuffled" if self._is_shuffled else "unshuffled"
            raise ConfigError(
                "predict must give a row for each sample, in the data's order. Received: "
                f"{order} data of which {n_dropped} samples are left out. Use shuffle=False (of a "
                "dataset shuffle_buffer=0) and drop_remainder=False."
            )

    # A `fit` that weighs slices by their rows.

    @property
    def needs_weights(self) -> bool:
        """True if ranks may have different numbers of rows of a batch in training.

        The ranks divide each full batch, so it does not depend on the batch size.
        """
        is_kept = not self._drop_remainder and not self.has_surplus_ranks
        return is_kept and self.samples % self._place()[1] > 0

    def weigh_in(self, epochs: Any) -> None:
        """Allow such batches in a `fit`, given by Keras's iterator of epochs."""
        self._weighing = weakref.ref(epochs)

    def weighs_in(self, epochs: Any) -> bool:
        """Return whether `weigh_in` was called for a `fit` that runs, and is still needed."""
        is_same = self._weighing is not None and self._weighing() is epochs
        return is_same and epochs is not None and self.needs_weights

    # Settings that a `fit` changes, and that are put back at its end.

    @contextlib.contextmanager
    def keep_settings(self) -> Iterator[None]:
        """Save settings for `put_back_settings`; an exception within the block calls it at once."""
        self.put_back_settings()  # of an earlier `fit` that broke off
        self._kept = self._batch_size, self.has_surplus_ranks
        try:
            yield
        except BaseException:
            self.put_back_settings()
            raise

    def put_back_settings(self) -> None:
        """Restore the saved batch size and surplus ranks, if there are any.

        A batch size that was set outside of `fit` in the meantime stays.
        """
        if self._kept is not None:
            (self._batch_size, self.has_surplus_ranks), self._kept = self._kept, None
            self._open = None

    def use_active_ranks(self) -> None:
        """Share batches among `count_active` ranks only, with weights, from the next pass on."""
        self.has_surplus_ranks, self._open = True, None

    def _is_ready(self) -> bool:
        """Return whether the number of ranks is known: data may be created before `init()`."""
        return self._rank_and_size is not None or runtime.is_initialized()

    def _place(self) -> tuple[int, int]:
        return self._rank_and_size or (runtime.rank(), runtime.size())


# The rest of an epoch that was interrupted.


def restore_data(data: Any, state: dict[str, int] | None, first_step: int | None) -> None:
    """Resume an epoch in the data of a running `fit` from its saved state, if it has one.

    An epoch whose `first_step` is above 0 must keep its batch size; at step 0 it may change. None:
    no epoch begins, and the batch size stays.
    """
    if state is not None and isinstance(data, DatasetBatches) and first_step is not None:
        data.restore(state, first_step)
    if state is None or not isinstance(data, GlobalBatches):
        return
    batch_size = data.batch_size
    if first_step is None:
        state = {**state, "batch_size": batch_size}
    # A callback that sets the batch size (`kept`) continues with its own.
    is_told = state["batch_size"] != batch_size and data._kept is None
    if is_told and runtime.rank() == 0:
        logger.warning(
            "The checkpoint has batches of %d, fit of %d.", state["batch_size"], batch_size
        )
    try:
        data.restore(state)
    except ConfigError as error:
        if state["samples"] != data.samples:
            raise
        if first_step == 0:  # then the program's own batch size is used
            data.restore({**state, "batch_size": batch_size})
            return
        raise ConfigError(
            f"batch_size must stay in an epoch. Received: batch_size={state['batch_size']} in "
            f"the checkpoint. {error} Start with a number of ranks that divides it, or move this "
            "checkpoint away."
        ) from error


def continue_epoch(epochs: Any, epoch: int, first_step: int) -> int:
    """Let the epoch that a running `fit` is about to begin start with a later step.

    `GlobalBatches` does not read the batches before it; other data is read and dropped up to there.
    See `begin_epoch_at`; `epochs` is None outside of a `fit`.
    """

    def rest_of(data: Any, first_step: int) -> _Rest | None:
        return _Rest(data, first_step) if isinstance(data, GlobalBatches) else None

    return first_step if epochs is None else begin_epoch_at(epochs, epoch, first_step, rest_of)


class _Rest(keras.utils.PyDataset):
    """The batches of a data set from some step on."""

    def __init__(self, data: GlobalBatches, first_step: int) -> None:
        super().__init__()
        self._data = data
        self._first = first_step

    def __len__(self) -> int:
        return int(self._data.num_batches) - self._first

    def __getitem__(self, index: int) -> Any:
        return self._data[index + self._first]

    def with_totals(self) -> Iterator[tuple[Any, int]]:
        """As for `GlobalBatches`."""
        return self._data.with_totals(self._first)

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()


# Batches of any size, independent of those served to `fit`.


def read_batches(
    data: GlobalBatches, batch_size: int, seed: int, class_weight: Mapping[int, float] | None = None
) -> Iterator[Any]:
    """Yield the global batches of an epoch shuffled by `seed`; `fit` on `data` is not affected."""
    slices = check_slices(BatchSlices(data.samples, batch_size))
    read = data._source.open_epoch(seed, 0, slices)
    for step in range(slices.steps):
        batch = read(step)
        if class_weight is not None:
            x, y = batch
            batch = x, y, class_weight_to_sample_weights(y, class_weight)
        yield batch
