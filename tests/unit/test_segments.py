"""Buffers of parameters, and who owns which part."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfscale.plan.buckets import GradientSpec, auto_bucket_bytes
from tfscale.plan.segments import ALIGNMENT, build_segments, row_cuts

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(
    st.builds(GradientSpec, st.just("w"), SHAPES, st.sampled_from(["float32", "float64"])),
    max_size=12,
)


@given(SPECS, st.integers(1, 7), st.sampled_from([0, 100, 2000]), st.sets(st.integers(0, 11)))
def test_every_element_has_one_owner(specs, size, bucket_bytes, whole):
    buckets = build_segments(specs, size, bucket_bytes, frozenset(whole))
    assert sorted(i for b in buckets for i in b.indices) == list(range(len(specs)))
    for bucket in buckets:
        assert bucket.cuts[0] == 0 and bucket.cuts[-1] == bucket.length
        assert list(bucket.cuts) == sorted(bucket.cuts)
        owned = [p for rank in range(size) for p in bucket.pieces(rank)]
        assert sum(p.count for p in owned) == sum(map(math.prod, bucket.shapes))
        for index, shape, offset in zip(bucket.indices, bucket.shapes, bucket.offsets, strict=True):
            parts = [p for p in owned if p.variable == index]
            ends = [0, *(p.stop for p in parts)]
            assert [p.start for p in parts] == ends[:-1] and ends[-1] == math.prod(shape)
            assert all(p.offset == offset + p.start for p in parts)
            assert offset * specs[index].item_bytes % ALIGNMENT == 0
            if index in whole:
                assert len(parts) <= 1


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(1, 8))
def test_segments_are_balanced(counts, size):
    specs = [GradientSpec("w", (n,), "float32") for n in counts]
    (bucket,) = build_segments(specs, size, 10**9)
    segments = [b - a for a, b in zip(bucket.cuts, bucket.cuts[1:], strict=False)]
    assert max(segments) - min(segments) <= 1


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    st.integers(1, 8),
    st.sampled_from([0, 4000, 20000, 10**6]),
)
def test_whole_variables_are_spread(counts, size, bucket_bytes):
    """Kernels and biases, alone or some in a bucket: no rank has more than one too many."""
    specs = [GradientSpec("w", (n,), "float32") for count in counts for n in (count, 1 + count % 9)]
    buckets = build_segments(specs, size, bucket_bytes, frozenset(range(len(specs))))
    loads = [sum(p.count for b in buckets for p in b.pieces(rank)) for rank in range(size)]
    largest = max(sum(map(math.prod, bucket.shapes)) for bucket in buckets)
    assert max(loads) <= sum(loads) / size + largest + len(specs) * ALIGNMENT // 4


@pytest.mark.parametrize("size", [2, 4, 8])
def test_equal_layers_are_spread_evenly(size):
    specs = [GradientSpec("w", shape, "float32") for shape in ((1024, 1024), (1024,)) * 8]
    buckets = build_segments(specs, size, auto_bucket_bytes(specs), frozenset(range(16)))
    loads = [sum(p.count for b in buckets for p in b.pieces(rank)) for rank in range(size)]
    assert max(loads) <= 1.01 * sum(loads) / size, loads


def test_forward_order():
    specs = [GradientSpec(f"w{i}", (100,), "float32") for i in range(4)]
    assert [b.indices for b in build_segments(specs, 2, 800)] == [(0, 1), (2, 3)]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 7), st.sampled_from([0, 100, 10**6]))
def test_cuts_between_rows(n_in, n_out, size, bucket_bytes):
    """The matrix and its bias are a bucket; what lies around them is not mixed."""
    specs = [GradientSpec("w", shape, "float64") for shape in ((5,), (n_in, n_out), (n_out,), (7,))]
    buckets = build_segments(specs, size, bucket_bytes, by_rows=[(1, 2)])
    assert [b.indices for b in buckets] == [(0,), (1, 2), (3,)]
    rows = row_cuts(n_in, size)
    for rank in range(size):
        begin, end = rows[rank] * n_out, rows[rank + 1] * n_out
        pieces = {p.variable: (p.start, p.stop) for p in buckets[1].pieces(rank)}
        assert pieces.pop(1, (begin, begin)) == (begin, end)
        assert pieces == ({2: (0, n_out)} if rank == size - 1 else {})


def test_groups_are_buckets_whatever_their_size():
    """A plan's groups; a variable of none is sent alone, and a matrix cut by rows by itself."""
    specs = [GradientSpec(f"v{i}", shape, "float32") for i, shape in enumerate([(40,), (8, 3)] * 3)]
    buckets = build_segments(specs, 2, 0, frozenset(), [(1,)], [[0, 2, 1], [5, 4]])
    assert [bucket.indices for bucket in buckets] == [(0, 2), (1,), (3,), (4, 5)]
    assert buckets[1].cuts == (0, 12, 32)  # between rows; padding is the last rank's
    assert [sum(map(math.prod, bucket.shapes)) for bucket in buckets] == [80, 24, 24, 64]
