"""Seeds that GlobalBatches.from_dataset hands to `decode`: for augmentation equal on any ranks."""

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.test_global_batches import as_rank
from tfscale.data import GlobalBatches


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
