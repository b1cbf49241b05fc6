"""Batches that feed fewer ranks than there are."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.served_batches import as_rank
from tfscale.data import GlobalBatches
from tfscale.data.slices import count_active, epoch_order


def served(data):
    return [tuple(np.asarray(part) for part in batch) for batch in data]


def make(rank, size, batch_size, **options):
    x = np.arange(24, dtype="float32")
    data = as_rank(GlobalBatches(x, -x, batch_size=size, seed=3, **options), rank, size)
    data.use_active_ranks()
    data.batch_size = batch_size
    return data


@given(st.integers(1, 200), st.integers(1, 40))
def test_active_ranks_are_as_many_as_share_equally_and_get_two_samples(batch_size, size):
    def fits(n):
        return batch_size % n == 0 and (n == 1 or batch_size // n >= 2)

    assert count_active(batch_size, size) == max(filter(fits, range(1, size + 1)))


@pytest.mark.parametrize(
    ("batch_size", "size", "active"), [(8, 4, 4), (4, 4, 2), (6, 4, 3), (2, 4, 1), (12, 8, 6)]
)
def test_weighted_mean_over_ranks_is_the_mean_of_the_batch(batch_size, size, active):
    ranks = [served(make(rank, size, batch_size)) for rank in range(size)]
    order = epoch_order(3, 0, 24)
    for step in range(24 // batch_size):
        batch = order[step * batch_size : (step + 1) * batch_size]
        means = [np.mean(x * w) for x, _, w in (own[step] for own in ranks)]
        assert np.mean(means) == pytest.approx(batch.mean())
        together = np.concatenate([own[step][0] for own in ranks[:active]])
        assert together.tolist() == batch.tolist()
    for rank in range(active, size):
        for (x, _, w), (other, _, _) in zip(ranks[rank], ranks[rank % active], strict=True):
            assert x.tolist() == other.tolist()
            assert not w.any()


def test_given_weights_are_kept():
    weights = np.linspace(1.0, 2.0, 24)
    first, surplus = (served(make(rank, 3, 2, sample_weight=weights)) for rank in (0, 2))
    own = weights[epoch_order(3, 0, 24)].reshape(-1, 2)
    np.testing.assert_allclose([w for *_, w in first], 3 * own, rtol=1e-6)
    assert not np.any([w for *_, w in surplus])


def test_records():
    records = tf.data.Dataset.range(24).map(lambda i: (tf.cast(i, tf.float32), i, 0.5))
    for rank, factor in ((0, 2.0), (2, 0.0)):
        data = GlobalBatches.from_dataset(records, batch_size=4, shuffle_buffer=0)
        as_rank(data, rank, 4)
        data.use_active_ranks()
        x, _, w = served(data)[0]
        assert x.tolist() == [0.0, 1.0]
        assert w.tolist() == [0.5 * factor] * 2
