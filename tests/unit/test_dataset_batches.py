"""Batches of a tf.data.Dataset in other sizes: what its steps tell, and what a `fit` is served."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.models import Recorder
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.callbacks import AdaptiveBatchSize, BatchSizeSchedule
from tfscale.config import ConfigError
from tfscale.data.dataset_batches import DatasetBatches
from tfscale.internals.datasets import (
    INFINITE,
    UNKNOWN,
    batch_rows_of,
    in_own_memory,
    rows_of,
    with_rows_of_one_shape,
)

pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True`")
TEN = tf.data.Dataset.range(10)
FOURS = TEN.batch(4)
WORDS = TEN.map(lambda n: tf.range(n))  # of 0 to 9 numbers


@pytest.mark.parametrize(
    ("dataset", "size", "rows"),
    [
        (FOURS, 4, 10),
        (TEN.batch(4, drop_remainder=True), 4, 8),
        (TEN.batch(4, num_parallel_calls=2), 4, 10),
        (FOURS.map(lambda n: n + 1).shuffle(3).cache().prefetch(1), 4, 10),
        (WORDS.ragged_batch(4), 4, 10),
        (WORDS.padded_batch(4, padded_shapes=[9]), 4, 10),
        (FOURS.repeat(3), 4, 30),
        (FOURS.repeat(), 4, INFINITE),
        (TEN.repeat().batch(4), 4, INFINITE),
        (FOURS.take(2), 4, UNKNOWN),
        (TEN.batch(4, drop_remainder=True).take(1), 4, 4),
        (TEN.filter(lambda n: n > 2).batch(4), 4, UNKNOWN),
        (FOURS.filter(lambda n: n[0] > 2), 4, UNKNOWN),
        (tf.data.Dataset.zip((FOURS, FOURS)), 4, UNKNOWN),
        (tf.data.Dataset.zip((FOURS, TEN.batch(5))), None, UNKNOWN),
        (FOURS.concatenate(FOURS), None, UNKNOWN),
    ],
)
def test_steps_tell_the_rows_of_a_batch_and_of_all(dataset, size, rows):
    assert (batch_rows_of(dataset), rows_of(dataset)) == (size, rows)


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (TEN, "a number, int64 of shape (), which has no rows"),
        (WORDS.padded_batch(4), "padded_batch with lengths that differ"),
        (WORDS.padded_batch(4).map(lambda n: n + 1).prefetch(1), "padded_batch with lengths that"),
        (TEN.window(4), "elements with a DatasetSpec"),
        (TEN.map(lambda n: (tf.ones([3]), tf.ones([4]))), "parts of a batch with 3, 4 rows"),
        (
            WORDS.bucket_by_sequence_length(tf.size, [4], [2, 2]),
            "bucket_by_sequence_length, which keeps its batch sizes",
        ),
    ],
)
def test_what_cannot_be_put_into_other_batches_is_named(dataset, why):
    with pytest.raises(ConfigError) as error:
        DatasetBatches(dataset)
    assert why in str(error.value)


@pytest.mark.parametrize(
    "dataset",
    [
        WORDS.ragged_batch(4),
        WORDS.padded_batch(4, padded_shapes=[9]),
        WORDS.padded_batch(4).unbatch().batch(4),  # rows of one length, the longest of four
        tf.data.Dataset.from_tensors({"a": tf.ones([4, 2]), "b": tf.sparse.eye(4)}),
    ],
)
def test_rows_of_any_kind_can_be_put_into_other_batches(dataset):
    assert DatasetBatches(dataset).batch_size == 4


def test_rows_of_other_shapes_are_refused_when_they_come():
    """A generator's specification leaves them open."""

    def of_lengths(*lengths):
        spec = (tf.TensorSpec((None, None)), tf.TensorSpec((None, 1)))
        batches = [(np.ones((2, n), "float32"), np.ones((2, 1), "float32")) for n in lengths]
        data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
        return with_rows_of_one_shape(data)

    assert [x.shape[1] for x, _ in of_lengths(3, 3, 3)] == [3, 3, 3]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"one shape.*\[4\].*after.*\[3\]"):
        list(of_lengths(3, 4))
    assert with_rows_of_one_shape(TEN) is TEN


def test_a_batch_size_that_steps_do_not_tell_can_be_given():
    dataset = FOURS.concatenate(FOURS).map(lambda n: (n,))
    with pytest.raises(ConfigError, match="start_batch_size"):
        AdaptiveBatchSize(dataset, 8)
    assert AdaptiveBatchSize(dataset, 8, start_batch_size=4).data.samples is None


# Under a `fit`, epoch by epoch.


class Epochs(keras.callbacks.Callback):
    """Notes how many batches were trained in each epoch, and how many Keras was told."""

    def __init__(self):
        super().__init__()
        self.ends, self.told = [0], []

    def on_epoch_begin(self, epoch, logs=None):
        self.told.append(None if self.params["steps"] is None else int(self.params["steps"]))

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(len(self.model.trained))


def served(dataset, sizes, epochs, model=None, told=True, **options):
    """Return the batches of each epoch of a `fit`, as lists of rows."""
    model, noted = model or Recorder(), Epochs()
    callbacks = [BatchSizeSchedule(sizes), noted]
    model.trained.clear()
    model.fit(dataset, epochs=epochs, callbacks=callbacks, verbose=0, **options)
    bounds = zip(noted.ends[:-1], noted.ends[1:], strict=True)
    found = [[list(batch) for batch in model.trained[i:j]] for i, j in bounds]
    assert noted.told == [len(batches) if told else None for batches in found]
    return found


def numbered(rows):
    return tf.data.Dataset.range(rows).map(lambda n: (n,))


def cut(rows, size):
    return [list(part) for part in np.split(np.array(rows), range(size, len(rows), size))]


def test_a_finite_dataset_grows_from_the_next_epoch_on():
    expected = [cut(range(10), size) for size in (4, 6, 6, 10)]
    assert served(numbered(10).batch(4), {1: 6, 3: 10}, 4) == expected


def test_full_batches_stay_full():
    full = numbered(10).batch(2, drop_remainder=True)
    expected = [cut(range(10), 2), cut(range(9), 3), cut(range(8), 4)]
    assert served(full, {1: 3, 2: 4}, 3) == expected
    # The rows that the dataset's own batches leave out are left out at all sizes.
    full = numbered(10).batch(4, drop_remainder=True)
    assert served(full, {1: 2}, 2) == [cut(range(8), 4), cut(range(8), 2)]


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_a_dataset_of_unknown_length_grows():
    odd = numbered(20).filter(lambda n: n % 2 == 1)
    expected = [cut(range(1, 20, 2), size) for size in (2, 5, 4)]
    assert served(odd.batch(2), {1: 5, 2: 4}, 3, told=False) == expected
    full = odd.batch(2, drop_remainder=True)
    expected[2] = expected[2][:2]  # of 4 rows, as the static shape says
    assert served(full, {1: 5, 2: 4}, 3, told=False) == expected


def test_an_iterator_that_repeats_serves_epochs_of_as_many_rows():
    data = numbered(10).repeat().batch(2)
    stream = list(range(10)) * 3
    expected = [cut(stream[:6], 2), cut(stream[6:12], 4), cut(stream[12:18], 6)]
    assert served(data, {1: 4, 2: 6}, 3, steps_per_epoch=3) == expected


def test_rows_that_full_batches_leave_over_come_in_the_next_epoch():
    data = numbered(10).repeat().batch(2, drop_remainder=True)
    stream = list(range(10)) * 3
    bounds = [(0, 6), (6, 10), (10, 18), (18, 22)]  # 6 rows each, but for 2 kept for the next
    expected = [cut(stream[i:j], size) for (i, j), size in zip(bounds, (2, 4, 4, 4), strict=True)]
    assert served(data, {1: 4}, 4, steps_per_epoch=3) == expected


def test_one_pass_may_serve_several_epochs():
    expected = [cut(range(4), 2), cut(range(4, 8), 4), cut(range(8, 12), 4)]
    assert served(numbered(12).batch(2), {1: 4}, 3, steps_per_epoch=2) == expected


def test_several_steps_may_be_executed_together():
    model = Recorder(steps_per_execution=2)
    expected = [cut(range(8), 2), cut(range(8), 4)]
    assert served(numbered(8).batch(2), {1: 4}, 2, model) == expected


def test_each_epoch_is_shuffled_again_and_a_seed_repeats_them():
    runs = []
    for _ in range(2):  # a dataset keeps the state of its shuffle: made again, as by a program
        tf.random.set_seed(1)
        runs.append(served(numbered(12).shuffle(12, seed=5).batch(3), {1: 4}, 3))
    assert runs[0] == runs[1]
    orders = [np.concatenate(batches).tolist() for batches in runs[0]]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_a_later_fit_begins_with_the_batches_of_the_dataset():
    data, model = numbered(8).batch(2), Recorder()
    grown = [cut(range(8), 2), cut(range(8), 4)]
    assert served(data, {1: 4}, 2, model) == grown

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(self.model.trained) == 5:
                raise KeyboardInterrupt

    model.trained.clear()
    schedule = BatchSizeSchedule(data, {1: 4})
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, epochs=2, callbacks=[schedule, Stop()], verbose=0)
    assert served(data, {1: 4}, 2, model) == grown
    model.trained.clear()
    model.fit(data, epochs=2, callbacks=[schedule], verbose=0)  # the one that was interrupted
    assert [list(batch) for batch in model.trained] == grown[0] + grown[1]
    model.trained.clear()
    model.fit(data, verbose=0)
    assert [list(batch) for batch in model.trained] == grown[0]


@pytest.mark.parametrize(
    ("data", "given", "options", "text"),
    [
        (numbered(8).batch(2), numbered(8).batch(2), {}, "the data that fit trains on"),
        (numbered(8).batch(2).repeat(), None, {}, "steps_per_epoch must be given"),
        (numbered(8).batch(2), None, {"steps_per_epoch": 3}, "a dataset of 4 batches"),
        (numbered(3).batch(2), None, {}, "samples=3"),
        (np.ones((8, 1)), None, {}, "data must be a batched tf.data.Dataset"),
    ],
)
def test_a_fit_that_does_not_suit_is_refused(data, given, options, text):
    schedule = BatchSizeSchedule({1: 4}) if given is None else BatchSizeSchedule(given, {1: 4})
    with pytest.raises(ConfigError) as error:
        Recorder().fit(data, epochs=2, callbacks=[schedule], verbose=0, **options)
    assert text in str(error.value)


@pytest.mark.parametrize("options", [{"active_ranks": "grow"}, {"signal": "noise_scale"}])
def test_options_for_global_batches_alone_are_refused(options):
    with pytest.raises(ConfigError, match="need GlobalBatches"):
        AdaptiveBatchSize(numbered(8).batch(2), 4, **options)


@pytest.mark.parametrize("dtype", ["float32", "int64", "string", "bool", "bfloat16"])
def test_a_batch_is_copied_into_memory_of_its_own(dtype):
    batch = {"a": tf.cast([1, 2], dtype) if dtype != "string" else tf.constant(["x", "y"])}
    batch["b"] = tf.ragged.constant([[1], [2, 3]])
    copied = in_own_memory(batch)
    assert copied["a"].dtype == dtype and (copied["a"] == batch["a"]).numpy().all()
    assert copied["b"].to_list() == [[1], [2, 3]]
    if dtype in ("float32", "int64"):
        assert not np.shares_memory(copied["a"].numpy(), batch["a"].numpy())
