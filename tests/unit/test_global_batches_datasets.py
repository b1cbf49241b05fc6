"""Which datasets of records GlobalBatches takes."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.unit.test_global_batches import as_rank
from tfscale.config import ConfigError, ExchangeError
from tfscale.data import GlobalBatches
from tfscale.fit.agreement import require_same_samples

ENDLESS = tf.data.Dataset.range(4).repeat()
NUMBERS = tf.data.Dataset.range


def test_what_ends_although_a_part_of_it_does_not():
    some = ENDLESS.filter(lambda i: i > 1)
    zipped = tf.data.Dataset.zip(some, tf.data.Dataset.range(5).filter(lambda i: i > 1))
    for dataset in (some.take(3), ENDLESS.take_while(lambda i: i < 3).map(abs), zipped):
        assert GlobalBatches.from_dataset(dataset, batch_size=1).samples == 3
    assert GlobalBatches.from_dataset(some, batch_size=1, size=7).samples == 7


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (tf.data.Dataset.range(4).repeat(), {}, "Received: an infinite dataset. Remove repeat"),
        (ENDLESS.filter(lambda i: i > 1), {}, "Received: an infinite dataset. Remove repeat"),
        (ENDLESS.flat_map(NUMBERS).map(abs).prefetch(2), {}, "an infinite dataset. Remove repeat"),
        (tf.data.Dataset.range(4), {"size": 5}, "Received: size=5, records=4. Leave size out"),
        (np.zeros(4), {}, "Received: ndarray. Pass arrays to GlobalBatches"),
        (tf.data.Dataset.range(4), {"size": 0}, "size must be a whole number of at least 1"),
        (tf.data.Dataset.range(4), {"shuffle_buffer": -1}, "shuffle_buffer must be"),
    ],
)
def test_bad_datasets(dataset, options, message):
    with pytest.raises(ConfigError, match=message):
        GlobalBatches.from_dataset(dataset, batch_size=2, **options)


@pytest.fixture
def no_global_seed():
    """Let shuffles have no seed but their own, as at the beginning of a program."""
    before = context.global_seed()
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(before)


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
def test_another_order_each_time_is_refused(make, no_global_seed):
    with pytest.raises(ConfigError, match=r"Received: a _.* Remove shuffle\(\), use list_files"):
        GlobalBatches.from_dataset(make(), batch_size=1)


def test_an_order_that_a_seed_has_fixed_is_taken_and_compared():
    def probe(global_seed):
        tf.random.set_seed(global_seed)
        numbers = NUMBERS(8).shuffle(8, seed=1, reshuffle_each_iteration=False).take(6)
        data = as_rank(GlobalBatches.from_dataset(numbers, batch_size=6))
        assert sorted(data[0][0].numpy()) == sorted(numbers.as_numpy_iterator())
        return data._source.probe()

    require_same_samples([probe(1), None, probe(1)])
    with pytest.raises(ExchangeError, match="other samples on rank 2 than on rank 1"):
        require_same_samples([None, probe(1), probe(2)])
    files = tf.data.Dataset.list_files(__file__, shuffle=False)
    assert GlobalBatches.from_dataset(files, batch_size=1).samples == 1


def test_pictures_are_compared_behind_their_border():
    def probe(middle):
        pictures = np.zeros((6, 28, 28))
        pictures[:, 10:18, 10:18] = middle
        return GlobalBatches(pictures, batch_size=2)._source.probe()

    require_same_samples([probe(1), probe(1)])
    with pytest.raises(ExchangeError, match="other samples on rank 1 than on rank 0, as x of fit"):
        require_same_samples([probe(1), probe(2)])
    assert GlobalBatches(np.zeros((2, 0)), batch_size=2)._source.probe() == [[], [], []]
