"""How much of communication is hidden behind computation. Pure: events in, times out.

Definitions, for the collectives ("slots") that one rank posted within one step, on one clock:

* posted: all inputs of the slot exist. started, ended: on the communication thread.
* A mark is the post of a slot, or a stamp: the moment at which the update of some variables is
  done (`tfscale.trace.stamps`). It needs the slots whose results go into it, as the traced graph
  says (`tfscale.trace.dependencies`). What is computed for a mark is computed between the end of
  the last slot that it needs and the mark; the rank is busy in this time.
* The rank is blocked while a slot is posted and not ended, and it is not busy. A slot that ends
  after the step has returned blocks nothing.
* Every moment counts once. T_b of a slot is the time in which it blocks the rank and no slot that
  ended earlier does. T_c of a slot is its T_b, and the time from its start to its end in which
  nothing blocks, less what slots that ended earlier are charged for.

With gradients only and without stamps the rank is busy until the last gradient is posted: the end
of back-propagation. A collective within the forward pass, which all later ones need, blocks from
the moment it is posted; one whose result nobody needs soon does not.

So the sum of T_b is the communication that is exposed, the sum of T_c is the time in which there
was any, 0 <= T_b <= T_c, and R lies between 0 and 100. The thesis's engine makes one blocking call
at a time, for which T_c and T_b are those of its equation.

Source: [T] eq. 3.8.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

EAGER = -1  # plan of a collective outside of any traced function: its caller waits for it


class Key(NamedTuple):
    """Which collective of a step: `repeat` counts executions of the slot within it.

    Stamps have negative slots.
    """

    plan: int
    slot: int
    repeat: int = 0


@dataclass(frozen=True)
class Slot:
    """One collective of one rank, times in ns of one clock."""

    key: Key
    posted: int
    started: int
    ended: int
    n_bytes: int = 0


@dataclass(frozen=True)
class SlotTimes:
    """What a slot cost its rank, in ns.

    Attributes:
        slot: The collective.
        t_c: Time of communication that is charged to this slot.
        t_b: The part of it in which the rank was blocked.
        waiting: The part of t_b from this rank's start to that of the slowest rank.
        behind: How much later than this rank the slowest one started it.
    """

    slot: Slot
    t_c: int
    t_b: int
    waiting: int
    behind: int


class Intervals:
    """A growing set of moments."""

    def __init__(self, parts: Iterable[tuple[int, int]] = ()) -> None:
        """Start with disjoint intervals, ascending."""
        self.parts = list(parts)

    def add(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Add [begin, end) and return the parts of it that are new, ascending."""
        new = self.without(begin, end)
        self.parts = merged([*self.parts, *new])
        return new

    def without(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [begin, end) that are not in the set, ascending."""
        new = []
        for low, high in self.parts:
            if high <= begin or low >= end:
                continue
            if low > begin:
                new.append((begin, low))
            begin = max(begin, high)
        if begin < end:
            new.append((begin, end))
        return new


def find_busy(
    slots: Sequence[Slot], before: Mapping[Key, frozenset[Key]], step_begin: int
) -> Intervals:
    """Return when a rank computes, as far as the marks show.

    Args:
        slots: The collectives and stamps of one step.
        before: For a mark (`repeat` 0), the slots it needs, directly or not.
        step_begin: When the step was called.
    """
    ended = {slot.key: slot.ended for slot in slots}
    eager = sorted(slot.ended for slot in slots if slot.key.plan == EAGER)
    # The next execution of the same function needs what the one before has changed.
    begins = {0: step_begin}
    for key, end in ended.items():
        if key.plan != EAGER:
            begins[key.repeat + 1] = max(end, begins.get(key.repeat + 1, end))
    spans = []
    for mark in slots:
        # Whoever calls an eager collective waits for it, and for the functions called before.
        over = sorted(ended.values()) if mark.key.plan == EAGER else eager
        n_over = bisect.bisect_right(over, mark.posted)
        ends = over[max(n_over - 1, 0) : n_over]
        if mark.key.plan != EAGER:
            repeat = mark.key.repeat
            ends.append(begins.get(repeat, step_begin))
            needs = before.get(mark.key._replace(repeat=0), frozenset())
            ends += [ended.get(key._replace(repeat=repeat), step_begin) for key in needs]
        begin = max([step_begin, *ends])
        if begin < mark.posted:
            spans.append((begin, mark.posted))
    return Intervals(merged(spans))


def analyse(
    slots: Sequence[Slot],
    busy: Intervals,
    slowest: Mapping[Key, int] | None = None,
    step_end: float = float("inf"),
) -> list[SlotTimes]:
    """Charge each moment of communication of a step to one slot; see the module.

    Args:
        slots: The collectives and stamps of one step of one rank.
        busy: See `find_busy`.
        slowest: When the last rank started each slot, in this rank's clock.
        step_end: When the step returned.

    Returns:
        One per collective, in the order in which they ended.
    """
    ordered = sorted((s for s in slots if s.key.slot >= 0), key=lambda s: s.ended)
    not_blocked, blocked = Intervals(busy.parts), Intervals()
    pieces = {}
    for slot in ordered:
        if slot.ended <= step_end:
            pieces[slot.key] = not_blocked.add(slot.posted, slot.ended)
            for begin, end in pieces[slot.key]:
                blocked.add(begin, end)
    charged = Intervals(blocked.parts)
    results = []
    for slot in ordered:
        own = pieces.get(slot.key, [])
        t_b = length(own)
        hidden = length(charged.add(slot.started, slot.ended))
        last = max((slowest or {}).get(slot.key, slot.started), slot.started)
        waiting = length(
            (max(b, slot.started), min(e, last)) for b, e in own if b < last and e > slot.started
        )
        results.append(SlotTimes(slot, t_b + hidden, t_b, waiting, behind=last - slot.started))
    return results


def merged(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals as disjoint ones, ascending."""
    union: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(parts: Iterable[tuple[int, int]]) -> int:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in parts)


def overlap_percent(t_c: float, t_b: float) -> float | None:
    """Return R = 100 * sum(T_c - T_b) / sum(T_c); None where nothing was sent.

    Args:
        t_c: Sum of T_c.
        t_b: Sum of T_b, in the same unit.

    Source: [T] eq. 3.8.
    """
    return 100.0 * (t_c - t_b) / t_c if t_c > 0 else None
