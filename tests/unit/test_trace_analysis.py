"""T_c, T_b and R against a computation of its own: moment by moment on a grid."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tfscale.measure.analysis import Intervals, Key, Slot, analyse, find_busy

NOTHING = {}


def slot(index, posted, started, ended, plan=0, repeat=0):
    return Slot(Key(plan, index, repeat), posted, started, ended, 8)


def stamp(index, at):
    return slot(-index, at, at, at)


def needs(**keys):
    """needs(m1=[0]) says that mark 1 needs slot 0; s1 is stamp 1."""
    sign = {"m": 1, "s": -1}
    return {
        Key(0, sign[name[0]] * int(name[1:])): frozenset(Key(0, i) for i in slots)
        for name, slots in keys.items()
    }


def times(slots, before=NOTHING, slowest=None, **options):
    found = analyse(slots, find_busy(slots, before, 0), slowest, **options)
    return {t.slot.key.slot: (t.t_c, t.t_b, t.waiting) for t in found}


def test_a_collective_that_others_need_blocks_from_the_moment_it_is_posted():
    slots = [slot(0, 2, 3, 6), slot(1, 10, 10, 10)]
    assert times(slots, needs(m1=[0]))[0] == (4, 4, 0)
    assert times(slots)[0] == (3, 0, 0)


def test_an_update_hides_what_it_does_not_need():
    """Back-propagation ends at 6; the first variables are updated from 8 to 13."""
    slots = [slot(0, 2, 3, 8), slot(1, 6, 8, 14), stamp(1, 13), stamp(2, 16)]
    assert times(slots, needs(s1=[0], s2=[1])) == {0: (5, 2, 0), 1: (6, 1, 0)}
    assert times(slots, needs(s1=[0, 1], s2=[0, 1])) == {0: (5, 2, 0), 1: (6, 6, 0)}


def test_steps_of_one_execution_are_apart():
    slots = [slot(0, 1, 1, 4), slot(0, 11, 11, 15, repeat=1)]
    assert find_busy(slots, NOTHING, 0).parts == [(0, 1), (4, 11)]


def test_the_caller_waits_for_an_eager_collective_but_not_for_what_ends_after_the_step():
    slots = [slot(0, 1, 2, 4, plan=-1), slot(1, 9, 9, 9), slot(2, 9, 9, 9, plan=-1)]
    assert times(slots)[0] == (3, 3, 0)
    slots = [slot(0, 10, 10, 14), slot(1, 10, 11, 30)]
    assert times(slots, step_end=15) == {0: (4, 4, 0), 1: (16, 0, 0)}


def test_waiting_for_the_slowest_rank():
    slots = [slot(0, 10, 11, 30)]
    assert times(slots, slowest={Key(0, 0): 25})[0] == (20, 20, 14)
    assert times(slots, slowest={Key(0, 0): 5})[0] == (20, 20, 0)
    assert analyse(slots, Intervals(), {Key(0, 0): 25})[0].lead == 14


@st.composite
def steps(draw):
    """Slots on a grid of moments; some need the results of slots before them."""
    slots, before = [], {}
    for index in range(draw(st.integers(1, 7))):
        needed = draw(st.sets(st.integers(0, index - 1))) if index else set()
        earliest = max([0, *(slots[i].ended for i in needed)])
        posted, queued, took = (draw(st.integers(0, n)) for n in (20, 6, 12))
        posted += earliest
        slots.append(slot(index, posted, posted + queued, posted + queued + took))
        before[Key(0, index)] = frozenset(Key(0, i) for i in needed)
    return slots, before


@settings(max_examples=200, deadline=None)
@given(steps())
def test_every_moment_is_charged_once(step):
    slots, before = step
    size = max(s.ended for s in slots) + 1
    busy, posted, on_wire = (np.zeros(size, bool) for _ in range(3))
    for own in slots:
        begin = max([0, *(o.ended for o in slots if o.key in before[own.key])])
        busy[begin : own.posted] = True
        posted[own.posted : own.ended] = True
        on_wire[own.started : own.ended] = True
    blocked = posted & ~busy
    found = analyse(slots, find_busy(slots, before, 0))
    assert sum(t.t_b for t in found) == blocked.sum()
    assert sum(t.t_c for t in found) == (on_wire | blocked).sum()
    assert all(0 <= t.waiting <= t.t_b <= t.t_c for t in found)
