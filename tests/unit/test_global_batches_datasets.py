"""Which datasets of records GlobalBatches takes."""

import numpy as np
import pytest
import tensorflow as tf

from tfscale.data import GlobalBatches
from tfscale.errors import ConfigError

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
