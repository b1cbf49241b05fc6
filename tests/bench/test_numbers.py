"""Medians, intervals and limits of the benchmarks."""

import pytest

from benchmarks.numbers import (
    Ratio,
    Weights,
    allreduce_bytes,
    bus_bandwidth,
    least_bytes,
    paired_ratio,
    physical_limit,
    spread,
)


def test_spread():
    assert spread([3.0, 1.0, 2.0]).median == 2.0
    assert (spread([3.0, 1.0]).low, spread([3.0, 1.0]).high) == (1.0, 3.0)
    five = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (five.low, five.median, five.high, five.n) == (2.0, 3.0, 4.0, 5)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ([2.0, 20.0, 6.0], [1.0, 10.0, 3.0], Ratio(2.0, 2.0, 2.0, 3, is_range=True)),  # a load
        ([2.0, 20.0, 200.0], [1.0, None, 100.0], Ratio(2.0, 2.0, 2.0, 2, is_range=True)),
        ([1.0, 2.0, 3.0, 4.0], [1.0] * 4, Ratio(2.5, 1.0, 4.0, 4, is_range=True)),
        ([1.0, None], [None, 1.0], None),
    ],
)
def test_paired_ratio_is_of_the_rounds_that_both_have(theirs, ours, expected):
    rounds = ({n: [s, s] for n, s in enumerate(every) if s} for every in (theirs, ours))
    assert paired_ratio(*rounds) == expected


def test_paired_ratio_has_an_interval_around_its_median():
    theirs = dict(enumerate([[2.0], [2.2], [1.8], [2.4], [2.0]]))
    ratio = paired_ratio(theirs, dict(enumerate([[1.0]] * 5)))
    assert ratio.low <= ratio.median == 2.0 <= ratio.high
    assert ratio.low < ratio.high
    assert not ratio.is_range


@pytest.mark.parametrize(("given", "expected"), [((1000, 4, 1.0), 1500), ((1000, 2, 0.5), 2000)])
def test_bus_bandwidth_is_that_of_nccl_tests(given, expected):
    assert bus_bandwidth(*given) == expected


def test_a_dense_layer_may_exchange_less_than_its_gradient():
    dense, other = Weights(1_001_000, 1000, 1000), Weights(50)
    assert allreduce_bytes([dense, other], 4) == 1.5 * 4 * 1_001_050
    assert least_bytes([dense, other], 4, local_batch=1) == 4 * 3 * 2000 + 1.5 * 4 * 50
    # With a large batch the gradient is the cheaper one.
    assert least_bytes([dense], 4, local_batch=10**6) == allreduce_bytes([dense], 4)


@pytest.mark.parametrize(("rate", "limit"), [(None, 0.1), (8e3, 1.0), (8e6, 0.1)])
def test_the_limit_is_the_longer_of_computing_and_sending(rate, limit):
    assert physical_limit(0.1, 1000, rate) == limit
