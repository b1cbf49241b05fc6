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
    return sum(math.prod(specs[i].shape) * WIDTHS[specs[i].dtype] for i in bucket)


@settings(max_examples=200)
@given(specs=specs_of_models, bucket_bytes=st.integers(0, 2000) | st.just(10**9))
def test_buckets(specs, bucket_bytes):
    """Of one dtype no bucket could take the first gradient of the next one."""
    buckets = build_buckets(specs, bucket_bytes)
    check_complete(specs, buckets)
    for bucket in buckets:
        assert len(bucket) == 1 or bytes_of(specs, bucket) <= bucket_bytes
    for dtype in WIDTHS:
        same = [b for b in buckets if specs[b[0]].dtype == dtype]
        for bucket, following in itertools.pairwise(same):
            assert min(bucket) > max(following)
            assert bytes_of(specs, bucket) + bytes_of(specs, following[:1]) > bucket_bytes


def test_the_last_of_several_buckets_are_small():
    """Nothing hides them: back-propagation has ended, and the next step reads them first."""
    mb = 2**20
    specs = [GradientSpec(f"layer{i}", (mb // 8,), "float32") for i in range(128)]
    buckets = build_buckets(specs, 8 * mb)
    assert [len(bucket) / 2 for bucket in buckets] == [8] * 7 + [4, 2, 1, 0.5, 0.5]
    (bucket,) = build_buckets(specs, 100 * mb)
    assert len(bucket) == 128


@pytest.mark.parametrize(
    ("megabytes", "expected"), [(0, 2**20), (1, 2**20), (80, 10 * 2**20), (999, 2**24)]
)
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


def test_the_work_of_buckets_grows_with_the_number_of_variables():
    """And not with its square: a model of 20,000 variables took minutes."""
    counts = []

    class Position(int):
        def __hash__(self):
            counts.append("hash")
            return super().__hash__()

    class Spec(GradientSpec):
        @property
        def n_bytes(self):
            counts.append("bytes")
            return super().n_bytes

    n = 500
    specs = [Spec(f"layer{i}/kernel", (4,), "float32") for i in range(n)]
    assert list(map(len, build_buckets(specs, 2**20))) == [128] * 3 + [116]
    assert counts.count("bytes") <= 2 * n
    assert len(group_buckets(specs, [list(map(Position, range(n // 2)))])) == 2 + n // 2
    assert counts.count("hash") <= 4 * n


def test_errors():
    with pytest.raises(PlanError, match="bucket_bytes=-1"):
        build_buckets([], -1)
    specs = [GradientSpec("weight", (1,), "float32")] * 2
    with pytest.raises(PlanError, match="must not share a variable"):
        group_buckets(specs, [[0, 1], [1]])
