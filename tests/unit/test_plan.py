"""Buckets: every gradient in exactly one, in the order in which they become ready."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfscale.config import PlanError
from tfscale.plan.buckets import GradientSpec, auto_bucket_bytes, build_buckets, group_buckets

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
specs_of_models = st.lists(
    st.builds(GradientSpec, st.just("weight"), shapes, st.sampled_from(sorted(WIDTHS))), max_size=12
)


def check_complete(specs, buckets):
    """Each spec in exactly one bucket, one dtype each, last variable first."""
    indices = [i for bucket in buckets for i in bucket]
    assert sorted(indices) == list(range(len(specs)))
    for bucket in buckets:
        assert bucket
        assert len({specs[i].dtype for i in bucket}) == 1
        assert list(bucket) == sorted(bucket, reverse=True)
    ready = [min(bucket) for bucket in buckets]
    assert ready == sorted(ready, reverse=True)


def bytes_of(specs, bucket):
    return sum(specs[i].n_bytes for i in bucket)


@given(shape=shapes, dtype=st.sampled_from(sorted(WIDTHS)))
def test_bytes_of_a_gradient(shape, dtype):
    assert GradientSpec("weight", shape, dtype).n_bytes == math.prod(shape) * WIDTHS[dtype]


@settings(max_examples=200)
@given(specs=specs_of_models, bucket_bytes=st.integers(0, 2000))
def test_buckets(specs, bucket_bytes):
    buckets = build_buckets(specs, bucket_bytes)
    check_complete(specs, buckets)
    for bucket in buckets:
        assert len(bucket) == 1 or bytes_of(specs, bucket) <= bucket_bytes
    assert build_buckets(specs, bucket_bytes) == buckets


@given(specs=specs_of_models, bucket_bytes=st.integers(0, 2000))
def test_neighbours_stay_together(specs, bucket_bytes):
    """Of one dtype: no bucket could take the first gradient of the next one."""
    for dtype in WIDTHS:
        same = [b for b in build_buckets(specs, bucket_bytes) if specs[b[0]].dtype == dtype]
        for bucket, following in itertools.pairwise(same):
            assert min(bucket) > max(following)
            first = specs[following[0]]
            assert bytes_of(specs, bucket) + first.n_bytes > bucket_bytes


@given(specs=specs_of_models)
def test_no_bytes_means_each_alone_and_many_mean_one_per_dtype(specs):
    huge = build_buckets(specs, 10**9)
    assert len(huge) == len({spec.dtype for spec in specs})
    for bucket in build_buckets(specs, 0):
        assert len(bucket) == 1 or bytes_of(specs, bucket) == 0


@given(specs=specs_of_models)
def test_automatic_size_lies_within_its_bounds(specs):
    assert 256 * 1024 <= auto_bucket_bytes(specs) <= 16 * 1024 * 1024


@pytest.mark.parametrize(("megabytes", "expected"), [(1, 2**18), (80, 10 * 2**20), (999, 2**24)])
def test_automatic_size_is_an_eighth_of_the_model(megabytes, expected):
    specs = [GradientSpec("weight", (megabytes * 2**18,), "float32")]
    assert auto_bucket_bytes(specs) == expected


@given(specs=specs_of_models, data=st.data())
def test_groups_of_the_user(specs, data):
    labels = data.draw(st.lists(st.integers(0, 3), min_size=len(specs), max_size=len(specs)))
    groups = [[i for i, label in enumerate(labels) if label == n] for n in range(3)]
    groups = [group for group in groups if group]
    buckets = group_buckets(specs, groups)
    check_complete(specs, buckets)
    for bucket in buckets:
        members = set(bucket)
        is_alone = len(members) == 1 and labels[bucket[0]] == 3
        assert is_alone or any(members <= set(group) for group in groups)
    for group in groups:
        n_dtypes = len({specs[i].dtype for i in group})
        assert sum(bool(set(b) & set(group)) for b in buckets) == n_dtypes


def test_errors():
    with pytest.raises(PlanError, match="bucket_bytes must be 0 or more. Received: bucket_bytes=-"):
        build_buckets([], -1)
    specs = [GradientSpec("weight", (1,), "float32")] * 2
    with pytest.raises(PlanError, match="A variable must be in one group only"):
        group_buckets(specs, [[0, 1], [1]])
