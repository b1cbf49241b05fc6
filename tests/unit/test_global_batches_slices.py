"""The arithmetic of global batches, and StepCount: an integer that is looked up at each use."""

import copy
import math
import numbers
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfscale.config import ConfigError, check_integer
from tfscale.data.slices import BatchSlices, StepCount, check_slices, epoch_order

SIZES = st.integers(1, 9)


def all_ranks(samples, batch_size, size, drop_remainder):
    return [BatchSlices(samples, batch_size, r, size, drop_remainder) for r in range(size)]


@given(size=SIZES, local=st.integers(1, 7), samples=st.integers(1, 200), drop=st.booleans())
def test_ranks_together_serve_what_one_process_serves(size, local, samples, drop):
    batch_size = size * local
    alone = BatchSlices(samples, batch_size, drop_remainder=drop)
    together = all_ranks(samples, batch_size, size, drop)
    served = []
    for step in range(alone.steps):
        pieces = [s.bounds(step) for s in together if step < s.steps]
        assert all(start < stop for start, stop in pieces)
        assert [stop for _, stop in pieces[:-1]] == [start for start, _ in pieces[1:]]
        assert (pieces[0][0], pieces[-1][1]) == alone.bounds(step)
        if step < samples // batch_size:
            assert {stop - start for start, stop in pieces} == {local} and len(pieces) == size
        served += range(*alone.bounds(step))
    assert served == list(range(samples - samples % batch_size * drop))
    steps = {s.steps for s in together}
    assert max(steps) == alone.steps and max(steps) - min(steps) <= (not drop)


@given(size=SIZES, local=st.integers(1, 7), samples=st.integers(1, 200))
def test_training_remainder_that_passes_the_check_is_equal_on_all_ranks(size, local, samples):
    ranks = all_ranks(samples, size * local, size, drop_remainder=False)
    try:
        check_slices(ranks[0], is_training=True)
    except ConfigError:
        assert samples < size or ranks[0].remainder % size
        return
    for step in range(ranks[0].steps):
        assert len({stop - start for start, stop in (s.bounds(step) for s in ranks)}) == 1


def test_an_empty_last_slice_is_one_step_less():
    steps = [s.steps for s in all_ranks(10, 8, 4, drop_remainder=False)]
    assert steps == [2, 2, 1, 1]
    with pytest.raises(IndexError, match=r"below 1. Received: step=1"):
        BatchSlices(10, 8, 3, 4, False).bounds(1)


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 300))
def test_order_is_a_permutation_of_seed_and_epoch(seed, epoch, samples):
    order = epoch_order(seed, epoch, samples)
    assert sorted(order) == list(range(samples))
    np.random.seed(epoch)  # another global state changes nothing
    np.testing.assert_array_equal(order, epoch_order(seed, epoch, samples))


def test_order_differs_between_epochs_and_seeds():
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize(
    ("slices", "is_training", "message"),
    [
        (BatchSlices(100, 10, 0, 4), True, "batch_size=10, size=4. Use batch_size=8 or 12"),
        (BatchSlices(100, 2, 0, 4), True, "batch_size=2, size=4. Use batch_size=4,"),
        (BatchSlices(100, 128, 0, 4), True, "batch_size=128, samples=100.*smaller batch_size"),
        (BatchSlices(3, 4, 0, 4, False), False, "samples=3, size=4. Use fewer ranks"),
        (BatchSlices(101, 20, 0, 4, False), True, "last batch=1, size=4. .*, or 100 samples"),
    ],
)
def test_refusals_name_the_remedy(slices, is_training, message):
    with pytest.raises(ConfigError, match=f"Received: .*{message}"):
        check_slices(slices, is_training)


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", None, True])
def test_integers_only(value):
    with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1"):
        check_integer("batch_size", value, 1)


def test_a_step_count_behaves_as_the_integer_that_it_has_at_each_use():
    count = StepCount(4)
    assert list(range(count)) == [0, 1, 2, 3] and (count or -1) is count
    count.value = 0
    assert list(range(count)) == [] and (count or -1) == -1
    count.value = 12
    assert isinstance(count, numbers.Integral)
    assert (int(count), float(count), repr(count), f"{count:03d}") == (12, 12.0, "12", "012")
    assert "%d" % count == "12"  # noqa: UP031
    assert count == 12 and count != 11 and count == StepCount(12)
    assert count > 0 and count >= 12 and count <= 12 and not count < 12
    assert (count + 1, 1 + count, count - 2, 14 - count, -count) == (13, 13, 10, 2, -12)
    assert (count * 2, 24 / count, count // 5, 26 % count, count / 8) == (24, 2.0, 2, 2, 1.5)
    assert math.log10(StepCount(100)) == 2 and np.log10(StepCount(100)) == 2
    assert min(2, count) == 2 and np.asarray(count) == 12
    assert copy.deepcopy(count) == 12 and pickle.loads(pickle.dumps(count)) == 12
