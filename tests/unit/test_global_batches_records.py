"""GlobalBatches.from_dataset: which datasets it takes, and how ranks share their records."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.models import Recorder
from tests.unit.served_batches import as_rank, require_shared_out
from tfscale.config import ConfigError, ExchangeError
from tfscale.data import GlobalBatches
from tfscale.fit.agreement import require_same_samples

FEATURES = {"x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


def decode(record):
    example = tf.io.parse_single_example(record, FEATURES)
    return example["x"], example["y"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three TFRecord files that hold the samples 0..49: x = (i, -i), y = i."""
    folder = tmp_path_factory.mktemp("records")
    paths = []
    for number, samples in enumerate(np.split(np.arange(50), [10, 37])):
        paths.append(str(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for i in samples:
                x = tf.train.Feature(float_list=tf.train.FloatList(value=[i, -i]))
                y = tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
                features = tf.train.Features(feature={"x": x, "y": y})
                writer.write(tf.train.Example(features=features).SerializeToString())
    return paths


def from_files(files, served_by=(0, 1), **options):
    data = GlobalBatches.from_dataset(tf.data.TFRecordDataset(files), decode=decode, **options)
    return as_rank(data, *served_by)


NUMBERS = tf.data.Dataset.range
ENDLESS = NUMBERS(4).repeat()


def labels(data):
    return [tuple(batch[1].numpy().tolist()) for batch in data]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("buffer", [None, 7, 0])
@pytest.mark.parametrize("drop", [True, False])
def test_union_over_ranks_is_one_process(files, size, buffer, drop):
    options = {"batch_size": 12, "seed": 3, "size": 48 if buffer != 0 else 50}
    options |= {"drop_remainder": drop, "shuffle_buffer": buffer}
    ranks = [from_files(files, (rank, size), **options) for rank in range(size)]
    is_even = drop or buffer != 0
    require_shared_out(ranks, from_files(files, **options), 2, labels, drop, is_even)


def test_the_global_seed_of_a_rank_does_not_matter(files):
    orders = []
    for rank_seed in (1, 2):
        keras.utils.set_random_seed(rank_seed)
        orders.append(labels(from_files(files, batch_size=10, seed=3)))
    assert orders[0] == orders[1]
    assert orders[0] != labels(from_files(files, batch_size=10, seed=4))
    tf.random.set_seed(5)
    first = tf.random.uniform([]).numpy()
    tf.random.set_seed(5)
    labels(from_files(files, batch_size=10))
    assert tf.random.uniform([]).numpy() == first, "the global seed is left alone"


def test_epochs_differ_and_a_whole_buffer_shuffles_over_files(files):
    data = from_files(files, batch_size=50)
    epochs = []
    for data.epoch in range(3):
        epochs += labels(data)
    assert len(set(epochs)) == 3 and all(sorted(e) == list(range(50)) for e in epochs)
    assert all(np.corrcoef(np.arange(50), e)[0, 1] < 0.5 for e in epochs)


def test_only_this_ranks_records_are_decoded(files):
    decoded = []

    def noting(record):
        x, y = decode(record)
        y = tf.numpy_function(lambda value: decoded.append(int(value)) or value, [y], tf.int64)
        return x, y

    data = GlobalBatches.from_dataset(
        tf.data.TFRecordDataset(files), batch_size=10, size=50, shuffle_buffer=0, decode=noting
    )
    as_rank(data, 1, 2)
    list(data)
    assert sorted(decoded) == [i for i in range(50) if i % 10 >= 5]


@pytest.mark.filterwarnings("error:.*ran out of data", "error:.*shuffle=True")
def test_fit_trains_on_each_epochs_batches():
    sizes, model = (10, 25, 5), Recorder()
    pairs = NUMBERS(50).map(lambda i: (i, i))
    data, again = (as_rank(GlobalBatches.from_dataset(pairs, batch_size=10)) for _ in range(2))

    class Grow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            data.batch_size = sizes[epoch]

    model.fit(data, epochs=3, verbose=0, callbacks=[Grow()])
    expected = []
    for again.epoch, again.batch_size in enumerate(sizes):
        expected += labels(again)
    assert model.trained == expected


def test_tensors_tuples_and_single_inputs():
    x, y = np.arange(8.0), np.arange(8)
    pairs = tf.data.Dataset.from_tensor_slices((x, y))
    data = GlobalBatches.from_dataset(
        pairs, batch_size=4, shuffle_buffer=0, decode=lambda x, y: ({"in": x}, y, x)
    )
    inputs, target, weight = as_rank(data, 1, 2)[1]
    np.testing.assert_array_equal(inputs["in"], [6, 7])
    np.testing.assert_array_equal(target, weight)
    (only,) = as_rank(GlobalBatches.from_dataset(pairs.map(lambda x, _: x), batch_size=4))[0]
    assert only.shape == (4,)


@pytest.mark.parametrize("drop", [True, False])
def test_records_of_varying_length_and_nested_records(drop):
    def records():
        for i in range(11):
            yield {"text": np.full(i % 4, i), "id": (i, [float(i)])}

    signature = {
        "text": tf.TensorSpec([None], tf.int64),
        "id": (tf.TensorSpec([], tf.int64), tf.TensorSpec([1], tf.float32)),
    }
    dataset = tf.data.Dataset.from_generator(records, output_signature=signature)
    served = []
    for rank in range(2):
        data = GlobalBatches.from_dataset(
            dataset, batch_size=4, shuffle_buffer=0, drop_remainder=drop,
            decode=lambda record: (tf.reduce_sum(record["text"]), record["id"][0]),
        )  # fmt: skip
        served.append(labels(as_rank(data, rank, 2)))
    tails = [[(8, 9)], [(10,)]]
    for rank, full in enumerate([[(0, 1), (4, 5)], [(2, 3), (6, 7)]]):
        assert served[rank] == full + (tails[rank] if not drop else [])


def test_steps_may_be_read_in_any_order(files):
    data = from_files(files, batch_size=10)
    in_order = labels(data)
    for step in (3, 0, 4, 4, 1, 2, 3):
        assert tuple(data[step][1].numpy()) == in_order[step]
    with pytest.raises(IndexError, match="Received: step=5"):
        data[5]


@pytest.mark.parametrize(
    ("served_by", "batch_size", "size", "drop", "step"),
    [((0, 1), 10, 60, True, 6), ((0, 2), 16, 64, True, 4), ((0, 1), 44, 56, False, 2)],
)
def test_a_last_batch_that_is_cut_short_is_reported(files, served_by, batch_size, size, drop, step):
    options = {"batch_size": batch_size, "size": size, "drop_remainder": drop}
    with pytest.raises(ConfigError, match=f"ended at step {step} of {step}, with size={size}"):
        list(from_files(files, served_by, **options))


def test_what_ends_although_a_part_of_it_does_not():
    some = ENDLESS.filter(lambda i: i > 1)
    zipped = tf.data.Dataset.zip(some, NUMBERS(5).filter(lambda i: i > 1))
    for dataset in (some.take(3), ENDLESS.take_while(lambda i: i < 3).map(abs), zipped):
        assert GlobalBatches.from_dataset(dataset, batch_size=1).samples == 3
    assert GlobalBatches.from_dataset(some, batch_size=1, size=7).samples == 7


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (ENDLESS, {}, "infinite"),
        (ENDLESS.filter(lambda i: i > 1), {}, "infinite"),
        (ENDLESS.flat_map(NUMBERS).map(abs).prefetch(2), {}, "infinite"),
        (NUMBERS(4), {"size": 5}, "Received: size=5, records=4"),
        (NUMBERS(4), {"size": 0}, "size"),
        (NUMBERS(4), {"shuffle_buffer": -1}, "shuffle_buffer"),
        (np.zeros(4), {}, "Received: ndarray"),
    ],
)
def test_bad_datasets(dataset, options, message):
    with pytest.raises(ConfigError, match=message):
        GlobalBatches.from_dataset(dataset, batch_size=2, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NUMBERS(8).shuffle(8),
        lambda: NUMBERS(8).shuffle(8, reshuffle_each_iteration=False),
        lambda: NUMBERS(8).shuffle(8, seed=1).map(abs).cache(),
        lambda: tf.data.Dataset.zip(NUMBERS(8), NUMBERS(8).shuffle(8, seed=1)),
        lambda: tf.data.Dataset.sample_from_datasets([NUMBERS(4), NUMBERS(4)]),
        lambda: tf.data.Dataset.list_files(__file__),
    ],
)
def test_another_order_each_time_is_refused(make):
    tf.random.set_seed(None)  # as at the beginning of a program: shuffles draw their own
    with pytest.raises(ConfigError, match=r"Received: a _.* Remove shuffle\(\), use list_files"):
        GlobalBatches.from_dataset(make(), batch_size=1)


@pytest.mark.parametrize("is_ordered", [None, True, False])
def test_elements_as_they_become_ready_are_refused(is_ordered):
    options = {"num_parallel_calls": 2, "deterministic": is_ordered}
    for records in (
        NUMBERS(8).map(abs, **options).filter(lambda number: number > 0),
        NUMBERS(4).interleave(lambda number: NUMBERS(2), **options),
    ):
        if is_ordered is not False:
            assert GlobalBatches.from_dataset(records, batch_size=1).samples in (7, 8)
            continue
        with pytest.raises(ConfigError, match="Dataset with deterministic=False. Leave"):
            GlobalBatches.from_dataset(records, batch_size=1)


def test_an_order_that_a_seed_has_fixed_is_taken_and_compared():
    def probe(global_seed):
        tf.random.set_seed(global_seed)
        numbers = NUMBERS(8).shuffle(8, seed=1, reshuffle_each_iteration=False).take(6)
        data = as_rank(GlobalBatches.from_dataset(numbers, batch_size=6))
        assert sorted(data[0][0].numpy()) == sorted(numbers.as_numpy_iterator())
        return data._source.probe()

    require_same_samples([probe(1), None, probe(1)])
    with pytest.raises(ExchangeError, match="other values on rank 2 than on rank 1"):
        require_same_samples([None, probe(1), probe(2)])
    files = tf.data.Dataset.list_files(__file__, shuffle=False)
    assert GlobalBatches.from_dataset(files, batch_size=1).samples == 1


@pytest.mark.parametrize("is_tuple", [False, True])
def test_seeds_differ_by_record_and_epoch_and_not_by_the_number_of_ranks(is_tuple):
    records = tf.data.Dataset.range(50)
    if is_tuple:
        records = records.map(lambda record: (record, tf.constant(1)))

    def decode(record, *_, seed):
        return record, tf.random.stateless_uniform([], seed)

    def draws(rank, size, epoch):
        data = GlobalBatches.from_dataset(records, batch_size=12, seed=5, decode=decode)
        data = as_rank(data, rank, size)
        data.epoch = epoch
        return [np.asarray(batch[1]) for batch in data]

    alone = draws(0, 1, 1)
    for step, pieces in enumerate(zip(*(draws(rank, 3, 1) for rank in range(3)), strict=True)):
        np.testing.assert_array_equal(np.concatenate(pieces), alone[step])
    both = np.concatenate([*alone, *draws(0, 1, 2)])
    assert len(both) == 96 and len(np.unique(both)) > 94
