"""Analyse recorded steps: computing, communication, waiting and their overlap.

Definitions, for the collectives ("slots") that one rank posted within one step, on one clock:

* A slot is posted when all its inputs exist. It is started and ended by the communication thread.
* A mark is the post of a slot, or a stamp: the time at which the update of some variables is done
  (`tfscale.trace.events.stamp_updates`). A mark needs the slots whose results it depends on in the
  traced graph (`collectives_before`). The rank is busy, computing for the mark, from the end of the
  last slot that the mark needs until the mark.
* The rank is blocked while a slot is posted and not ended, and the rank is not busy. A slot that
  ends after the step has returned does not block.
* Every moment counts once. T_b of a slot is the time in which it blocks the rank and no slot that
  ended earlier does. T_c of a slot is its T_b plus the time from its start to its end in which no
  slot blocks, without time that already counts for slots that ended earlier.

With gradients only, and without stamps, the rank is busy until the last gradient is posted: the end
of back-propagation. A collective in the forward pass, needed by all later slots, blocks from the
moment it is posted; a collective whose result is not needed soon does not.

So the sum of T_b is the exposed communication, the sum of T_c is the time with any communication,
0 <= T_b <= T_c, and R lies between 0 and 100. The engine of [T] makes one blocking call at a time,
for which T_c and T_b are those of its equation 3.8.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tfscale.trace.stamps import INPUT_SLOT, has_slot, wait_slot

EAGER = -1  # plan of a collective outside of traced functions: its caller waits for it


class Key(NamedTuple):
    """Key of a collective of a step: `repeat` counts executions of the slot within the step.

    Stamps have negative slots.
    """

    plan: int
    slot: int
    repeat: int = 0


class Slot(NamedTuple):
    """One collective of one rank; times in ns, all of one clock."""

    key: Key
    posted: int
    started: int
    ended: int
    n_bytes: int = 0


class SlotTimes(NamedTuple):
    """Times of a slot on its rank, in ns."""

    slot: Slot
    t_c: int  # time of communication that is charged to this slot
    t_b: int  # the part of it in which the rank was blocked
    waiting: int  # the part of t_b from this rank's start to that of the slowest rank
    lead: int  # start of the slot on the slowest rank minus that on this rank


class Intervals:
    """A growing set of times, as disjoint intervals, ascending."""

    def __init__(self, parts: Iterable[tuple[int, int]] = ()) -> None:
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
    """Return the times of a step in which a rank computes, as far as marks show.

    `before` has for each mark (with `repeat` 0) the slots it needs, directly or indirectly.
    """
    ended = {slot.key: slot.ended for slot in slots}
    eager = [slot.ended for slot in slots if slot.key.plan == EAGER]
    # The next execution of a function needs the variables that the one before has changed.
    begins = {0: step_begin}
    for key, end in ended.items():
        if key.plan != EAGER:
            begins[key.repeat + 1] = max(end, begins.get(key.repeat + 1, end))
    spans = []
    for mark in slots:
        # The caller of an eager collective waits for it, and for the functions called before.
        waited_for = ended.values() if mark.key.plan == EAGER else eager
        ends = [end for end in waited_for if end <= mark.posted]
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
    """Attribute each moment of communication of a step to one slot, in the order of their ends.

    `slowest` has the time at which the last rank started each slot, in this rank's clock.
    """
    ordered = sorted((s for s in slots if s.key.slot >= 0), key=lambda s: s.ended)
    seen = Intervals(busy.parts)
    pieces = {s.key: seen.add(s.posted, s.ended) for s in ordered if s.ended <= step_end}
    charged = Intervals(merged(part for slot_pieces in pieces.values() for part in slot_pieces))
    results = []
    for slot in ordered:
        slot_pieces = pieces.get(slot.key, [])
        t_b = length(slot_pieces)
        hidden = length(charged.add(slot.started, slot.ended))
        last = max((slowest or {}).get(slot.key, slot.started), slot.started)
        waiting = length(
            (max(b, slot.started), min(e, last))
            for b, e in slot_pieces
            if b < last and e > slot.started
        )
        results.append(SlotTimes(slot, t_b + hidden, t_b, waiting, lead=last - slot.started))
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
    """Return R of [T] eq. 3.8, 100 * sum(T_c - T_b) / sum(T_c); None without communication."""
    return 100.0 * (t_c - t_b) / t_c if t_c > 0 else None


def collectives_before(graph: Any) -> dict[Key, frozenset[Key]]:
    """Return for each collective of a function's graph its ancestors, by data or control inputs.

    Ops inside functions that the function calls are not included.
    """
    keys: list[Key] = []
    reached: dict[Any, int] = {}  # per op, a bit for each collective it needs
    before: dict[Key, int] = {}
    for op in graph.get_operations():  # in the order of creation: inputs come first
        needed = 0
        for tensor in op.inputs:
            needed |= reached.get(_producer(tensor), 0)
        for other in op.control_inputs:
            needed |= reached.get(other, 0)
        if has_slot(op):
            key = Key(int(op.get_attr("plan")), int(op.get_attr("slot")))
            before[key] = needed
            needed |= 1 << len(keys)
            keys.append(key)
        if needed:
            reached[op] = needed
    return {
        key: frozenset(other for bit, other in enumerate(keys) if bits >> bit & 1)
        for key, bits in before.items()
    }


def _producer(tensor: Any) -> Any:
    """Return the op that computes a tensor.

    Keras passes all gradients through one IdentityN, which TensorFlow removes before it runs the
    function. So an output of IdentityN depends only on its own input.
    """
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op


# Step, label, slot and repeat identify a collective on all ranks; numbers of plans differ.
Shared = tuple[int, str, int, int]
Starts = dict[Shared, int]
_COLUMNS = ("plan", "slot", "posted_ns", "started_ns", "ended_ns", "bytes")


class Window(NamedTuple):
    """A call of the train function, in ns: steps `step` to `step + n_steps - 1` of an epoch."""

    step: int
    n_steps: int
    begin: int
    end: int


@dataclass
class RankRecord:
    """The records of a rank in an epoch; times in ns of rank 0's clock."""

    windows: list[Window]  # the recorded steps, ascending
    events: np.ndarray | None = None  # with the fields of the engine's Event
    names: dict[Key, str] = field(default_factory=dict)  # label per slot
    before: dict[Key, frozenset[Key]] = field(default_factory=dict)  # per slot, those it needs


def _window_of(events: np.ndarray, windows: Sequence[Window]) -> np.ndarray:
    """Return the index of the window in which each event was posted; -1 without one."""
    posted = events["posted_ns"]
    if not windows:
        return np.full(len(posted), -1)
    begins = np.array([window.begin for window in windows], np.int64)
    ends = np.array([window.end for window in windows], np.int64)
    places = np.searchsorted(begins, posted, "right") - 1
    return np.where(posted <= ends[places], places, -1)


def events_within(events: np.ndarray, windows: Sequence[Window]) -> np.ndarray:
    """Return the events that were posted within one of the windows, or pending when one began."""
    begins = np.array([*(window.begin for window in windows), np.iinfo(np.int64).max], np.int64)
    next_begin = begins[
        np.searchsorted(begins, events["posted_ns"], "right").clip(max=len(windows))
    ]
    return events[(_window_of(events, windows) >= 0) | (events["ended_ns"] > next_begin)]


def slots_by_step(record: RankRecord) -> dict[int, list[Slot]]:
    """Return the collectives posted within each window, in the order of posting."""
    slots_of: dict[int, list[Slot]] = {window.step: [] for window in record.windows}
    if record.events is None:
        return slots_of
    events = np.sort(record.events, order=["posted_ns", "slot"])
    events = events[events["slot"] > INPUT_SLOT]
    columns = [events[name].tolist() for name in _COLUMNS]
    repeats: dict[tuple[int, int, int], int] = defaultdict(int)
    places = _window_of(events, record.windows).tolist()
    for window_index, plan, slot, *times in zip(places, *columns, strict=True):
        if window_index >= 0:
            repeat = repeats[window_index, plan, slot]
            repeats[window_index, plan, slot] += 1
            slots_of[record.windows[window_index].step].append(
                Slot(Key(plan, slot, repeat), *times)
            )
    return slots_of


class Waits(NamedTuple):
    """Intervals of a step in which a rank neither computes nor exchanges gradients, ascending."""

    input: list[tuple[int, int]]  # until the batch exists
    forward: list[tuple[int, int]]  # for parameters that an earlier step has sent


def find_waits(record: RankRecord, window: Window) -> Waits:
    """Return the waits of a step, from the stamps of its batch and of its layers.

    The batch of a later step of one execution is waited for from the last event before its stamp. A
    collective of the function proves that the batch existed, even if its stamp comes later. A layer
    waits for its parameters from the time at which its inputs exist.
    """
    if record.events is None:
        return Waits([], [])
    posted, slots = record.events["posted_ns"], record.events["slot"]
    is_inside = (posted >= window.begin) & (posted <= window.end)
    inputs: list[tuple[int, int]] = []
    forward: list[tuple[int, int]] = []
    before = window.begin
    for event in np.sort(record.events[is_inside], order="posted_ns"):
        at, slot = int(event["posted_ns"]), int(event["slot"])
        if slot == INPUT_SLOT:
            inputs.append((before if inputs else window.begin, at))
        elif slot < INPUT_SLOT:
            is_its_gather = (slots == wait_slot(slot)) & (record.events["plan"] == event["plan"])
            is_pending = is_its_gather & (posted < at) & (record.events["ended_ns"] > at)
            ends = record.events["ended_ns"][is_pending].tolist()
            forward += [(at, min(end, window.end)) for end in ends]
        before = at
    if inputs:
        is_first = is_inside & (slots >= 0) & (record.events["plan"] != EAGER)
        begin, end = inputs[0]
        inputs[0] = (begin, min([end, *posted[is_first].tolist()]))
    input_times = Intervals(inputs)
    return Waits(inputs, [part for wait in merged(forward) for part in input_times.without(*wait)])


def _shared_key(step: int, key: Key, names: Mapping[Key, str]) -> Shared:
    label = names.get(key._replace(repeat=0), "eager")
    # Without Keras's numbers of layers: they count per process and may differ between ranks.
    return step, re.sub(r"_\d+(?=\W|$)", "", label), key.slot, key.repeat


def starts_of(record: RankRecord) -> Starts:
    """Return the times at which a rank started each collective of each step."""
    return {
        _shared_key(step, slot.key, record.names): slot.started
        for step, own in slots_by_step(record).items()
        for slot in own
        if slot.key.slot >= 0
    }


def merge_starts(starts_by_rank: Sequence[Starts]) -> Starts:
    """Return the latest start of each slot of each step, given those of every rank."""
    latest: Starts = {}
    for starts in starts_by_rank:
        for key, started in starts.items():
            latest[key] = max(started, latest.get(key, started))
    return latest


def rows(
    labels: Mapping[str, int], record: RankRecord, slowest: Starts, origin_ns: int
) -> Iterator[dict[str, Any]]:
    """Yield the report's lines of an epoch and rank, with times in seconds since `origin_ns`.

    There is a line of kind "step" per step, followed by one of kind "slot" per collective.

    Args:
        labels: The numbers of the epoch and the rank, which each line begins with.
        record: What the rank recorded in the epoch.
        slowest: When the last rank started each collective.
        origin_ns: Time 0 of the report, in nanoseconds.
    """
    slots = slots_by_step(record)
    for window in record.windows:
        step_slots = slots[window.step]
        shared = {slot.key: _shared_key(window.step, slot.key, record.names) for slot in step_slots}
        latest = {key: slowest[name] for key, name in shared.items() if name in slowest}
        waits = find_waits(record, window)
        marked = find_busy(step_slots, record.before, window.begin).parts
        busy = Intervals(merged([*marked, *waits.input, *waits.forward]))
        times = analyse(step_slots, busy, latest, window.end)
        where = {**labels, "step": window.step}
        row = {"kind": "step", **where, **_step(window, record, times, waits, origin_ns)}
        if record.events is not None:
            parts = {"busy_s": busy.parts, "input_at_s": waits.input, "forward_at_s": waits.forward}
            for name, spans in parts.items():
                row[name] = [[_seconds(t - origin_ns) for t in span] for span in spans]
        yield row
        for slot_times in times:
            yield {"kind": "slot", **where, **_slot(slot_times, record.names, origin_ns)}


def _step(
    window: Window, record: RankRecord, times: Sequence[SlotTimes], waits: Waits, origin_ns: int
) -> dict[str, Any]:
    duration = window.end - window.begin
    row: dict[str, Any] = {
        "n_steps": window.n_steps,
        "begin_s": _seconds(window.begin - origin_ns),
        "step_s": _seconds(duration),
    }
    if record.events is None:
        return row
    t_c, t_b = sum(t.t_c for t in times), sum(t.t_b for t in times)
    input_ns, forward_ns = length(waits.input), length(waits.forward)
    return row | {
        "compute_s": _seconds(duration - t_b - input_ns - forward_ns),
        "input_s": _seconds(input_ns),
        "forward_wait_s": _seconds(forward_ns),
        "exposed_s": _seconds(t_b),
        "waiting_s": _seconds(sum(t.waiting for t in times)),
        "t_c_s": _seconds(t_c),
        "overlap_percent": overlap_percent(t_c, min(t_b + forward_ns, t_c)),
        "bytes": sum(t.slot.n_bytes for t in times),
    }


def _slot(times: SlotTimes, names: Mapping[Key, str], origin_ns: int) -> dict[str, Any]:
    slot = times.slot
    name = "eager" if slot.key.plan == EAGER else names.get(slot.key._replace(repeat=0), "")
    return {
        **slot.key._asdict(),
        "name": name,
        "bytes": slot.n_bytes,
        "posted_s": _seconds(slot.posted - origin_ns),
        "started_s": _seconds(slot.started - origin_ns),
        "ended_s": _seconds(slot.ended - origin_ns),
        "t_c_s": _seconds(times.t_c),
        "t_b_s": _seconds(times.t_b),
        "waiting_s": _seconds(times.waiting),
        "lead_s": _seconds(times.lead),
    }


def _seconds(time_ns: int) -> float:
    return round(time_ns / 1e9, 9)
