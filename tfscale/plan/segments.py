"""Layout of a bucket's parameters in one flat buffer with a segment for each rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfscale.plan.buckets import GradientSpec, build_buckets, group_buckets

ALIGNMENT = 64  # bytes; TensorFlow refuses tensors of another alignment


@dataclass(frozen=True)
class Piece:
    """The part of a variable that lies in one rank's segment, in elements."""

    variable: int  # position in the sequence of specs
    start: int  # in the flattened variable
    stop: int  # excluded
    offset: int  # of the piece in the buffer

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class SegmentedBucket:
    """Variables one after another in a flat buffer that is cut into a segment for each rank."""

    indices: tuple[int, ...]  # positions in the sequence of specs, in forward order
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    offsets: tuple[int, ...]  # where each begins, in elements; multiples of 64 bytes
    cuts: tuple[int, ...]  # 0, then the end of each rank's segment, in elements
    length: int  # elements of the buffer, including padding

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of a rank, given by its position among those that share the buffer."""
        begin, end = self.cuts[rank], self.cuts[rank + 1]
        pieces = []
        for index, shape, offset in zip(self.indices, self.shapes, self.offsets, strict=True):
            start = max(begin - offset, 0)
            stop = min(end - offset, math.prod(shape))
            if start < stop:
                pieces.append(Piece(index, start, stop, offset + start))
        return tuple(pieces)


def row_cuts(n_rows: int, size: int) -> list[int]:
    """Return each rank's first row, then `n_rows`; numbers of rows differ by one at most."""
    return [n_rows * rank // size for rank in range(size + 1)]


def block_cuts(count: int, block: int, size: int) -> tuple[int, ...]:
    """Return where each rank's part of `count` elements begins, and the end.

    Parts have whole blocks, of numbers that differ by one at most.
    """
    n_blocks = -(-count // block)
    return tuple(min(count, n_blocks * rank // size * block) for rank in range(size + 1))


def build_segments(
    specs: Sequence[GradientSpec],
    size: int,
    bucket_bytes: int,
    whole: frozenset[int] = frozenset(),
    by_rows: Sequence[tuple[int, ...]] = (),
    groups: Sequence[Sequence[int]] | None = None,
) -> tuple[SegmentedBucket, ...]:
    """Lay out variables in buckets, each of which is a flat buffer, in forward order.

    Args:
        specs: One per variable, in forward order; dtypes are those of the parameters.
        size: Number of ranks that share each buffer.
        bucket_bytes: Upper bound of a bucket in bytes; 0 gives each variable its own bucket.
        whole: Positions of variables that one rank owns entirely.
        by_rows: Groups of variables of one dtype that form a bucket each: first a matrix that
            is cut between rows by `row_cuts`, then variables that the last rank owns.
        groups: Positions that form a bucket each, of any size; variables in no group get their
            own bucket. None groups by `bucket_bytes`.

    Returns each spec in exactly one bucket, with segments as equal in length as possible. Buckets
    with whole variables are cut so that the ranks' bytes in all buckets so far differ least.
    """
    apart = {i for group in by_rows for i in group}
    sent_together: list[Sequence[int]] = []
    if groups is not None:
        rest = [[i for i in group if i not in apart] for group in groups]
        buckets = group_buckets(specs, [group for group in rest if group])
        sent_together += [bucket for bucket in buckets if bucket[0] not in apart]
    else:
        # Gradients before and after a matrix that is cut by rows are not ready together.
        for is_own, run in itertools.groupby(range(len(specs)), lambda i: i in apart):
            part = list(run)
            buckets = () if is_own else build_buckets([specs[i] for i in part], bucket_bytes)
            sent_together += [[part[i] for i in bucket] for bucket in buckets]
    segments = [_segment(specs, list(group), size, cuts_rows=True) for group in by_rows]
    segments += [_segment(specs, sorted(indices), size) for indices in sent_together]
    loads, placed = [0] * size, []  # bytes of each rank
    for segment in sorted(segments, key=lambda segment: segment.indices):
        item_bytes = specs[segment.indices[0]].item_bytes
        layouts = _layouts_of_whole(segment, whole, loads) or [segment.cuts]
        after = [
            [load + (b - a) * item_bytes for load, a, b in zip(loads, cuts, cuts[1:], strict=False)]
            for cuts in layouts
        ]
        loads, cuts = min(
            zip(after, layouts, strict=True), key=lambda pair: sum(load**2 for load in pair[0])
        )
        placed.append(replace(segment, cuts=cuts))
    return tuple(placed)


def _layouts_of_whole(
    segment: SegmentedBucket, whole: frozenset[int], loads: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return ways to cut a bucket around its whole variables; none if no cut lies in one of them.

    Cuts move to the nearer end, or all to the beginning or the end of the variable. A bucket of
    whole variables only may be that of the rank with the smallest of the `loads`.
    """
    moved: dict[int, tuple[int, int]] = {}
    ends = [*segment.offsets[1:], segment.length]
    for index, begin, end in zip(segment.indices, segment.offsets, ends, strict=True):
        if index in whole:
            moved |= {cut: (begin, end) for cut in segment.cuts if begin < cut < end}
    if not moved:
        return []
    nearer = {c: begin if c - begin < end - c else end for c, (begin, end) in moved.items()}
    ahead = {c: begin for c, (begin, _) in moved.items()}
    after = {c: end for c, (_, end) in moved.items()}
    cuts = [tuple(to.get(c, c) for c in segment.cuts) for to in (nearer, ahead, after)]
    if whole.issuperset(segment.indices):
        owner = loads.index(min(loads))
        cuts.append((0,) * (owner + 1) + (segment.length,) * (len(loads) - owner))
    return cuts


def _segment(
    specs: Sequence[GradientSpec], indices: list[int], size: int, cuts_rows: bool = False
) -> SegmentedBucket:
    shapes = tuple(specs[i].shape for i in indices)
    counts = [math.prod(shape) for shape in shapes]
    step = ALIGNMENT // specs[indices[0]].item_bytes
    padded = [-(-count // step) * step for count in counts]
    offsets = [0, *itertools.accumulate(padded)]
    length = offsets.pop()
    if cuts_rows:
        cuts = [row * shapes[0][1] for row in row_cuts(shapes[0][0], size)[:-1]] + [length]
    else:
        cuts = [length * rank // size for rank in range(size + 1)]
    dtype = specs[indices[0]].dtype
    return SegmentedBucket(tuple(indices), shapes, dtype, tuple(offsets), tuple(cuts), length)
