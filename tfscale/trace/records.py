"""What is written down of a run: one record per step and rank, one per slot. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tfscale.trace.analysis import EAGER, Key, Slot, SlotTimes, analyse, find_busy, overlap_percent

# How all ranks know a collective of a step: label, slot, repeat. Each rank numbers its own plans.
Shared = tuple[str, int, int]
Starts = dict[int, dict[Shared, int]]  # by step
_COLUMNS = ("plan", "slot", "posted_ns", "started_ns", "ended_ns", "bytes")


class Window(NamedTuple):
    """A call of the train function: steps `step` to `step + n_steps - 1` of an epoch; in ns."""

    step: int
    n_steps: int
    begin: int
    end: int


@dataclass
class RankRecord:
    """What a rank recorded in an epoch, times in ns of rank 0's clock.

    Attributes:
        windows: The recorded steps, ascending.
        events: Array with the fields of the engine's Event.
        names: Label per slot.
        before: Per slot, those it needs; see `tfscale.trace.dependencies`.
    """

    windows: list[Window]
    events: np.ndarray | None = None
    names: dict[Key, str] = field(default_factory=dict)
    before: dict[Key, frozenset[Key]] = field(default_factory=dict)


def events_within(events: np.ndarray, windows: Sequence[Window]) -> np.ndarray:
    """Return the events that were posted within one of the windows."""
    begins = np.array([w.begin for w in windows], np.int64)
    ends = np.array([w.end for w in windows], np.int64)
    if not len(windows):
        return events[:0]
    place = np.searchsorted(begins, events["posted_ns"], "right") - 1
    return events[(place >= 0) & (events["posted_ns"] <= ends[np.maximum(place, 0)])]


def slots_by_step(record: RankRecord) -> dict[int, list[Slot]]:
    """Return the collectives posted within each window, in the order of posting."""
    found: dict[int, list[Slot]] = {window.step: [] for window in record.windows}
    if record.events is None or not record.windows:
        return found
    events = np.sort(record.events, order=["posted_ns", "slot"])
    begins = np.array([w.begin for w in record.windows], np.int64)
    places = np.searchsorted(begins, events["posted_ns"], "right") - 1
    columns = [events[name].tolist() for name in _COLUMNS]
    repeats: dict[tuple[int, int, int], int] = defaultdict(int)
    for place, plan, slot, *times in zip(places.tolist(), *columns, strict=True):
        if place < 0 or times[0] > record.windows[place].end:
            continue
        repeat = repeats[place, plan, slot]
        repeats[place, plan, slot] += 1
        found[record.windows[place].step].append(Slot(Key(plan, slot, repeat), *times))
    return found


def shared_key(key: Key, names: Mapping[Key, str]) -> Shared:
    """Return what all ranks call a collective.

    Keras numbers layers by a count of the process, which may differ between ranks.
    """
    label = names.get(key._replace(repeat=0), "eager")
    return re.sub(r"_\d+(?=\W|$)", "", label), key.slot, key.repeat


def starts_of(record: RankRecord) -> Starts:
    """Return when a rank started each collective of each step."""
    return {
        step: {shared_key(s.key, record.names): s.started for s in own if s.key.slot >= 0}
        for step, own in slots_by_step(record).items()
    }


def merge_starts(every: Sequence[Starts]) -> Starts:
    """Return the latest start of each slot of each step.

    Args:
        every: Per rank, when it started them.
    """
    merged: Starts = {}
    for starts in every:
        for step, own in starts.items():
            latest = merged.setdefault(step, {})
            for key, started in own.items():
                latest[key] = max(started, latest.get(key, started))
    return merged


def rows(
    place: Mapping[str, int], record: RankRecord, slowest: Starts, origin_ns: int
) -> Iterator[dict[str, Any]]:
    """Return the lines of an epoch and rank.

    Args:
        place: Number of the epoch and the rank.
        record: What the rank recorded.
        slowest: Per step and slot, when the last rank started it.
        origin_ns: Which time of rank 0's clock is 0 in the lines.

    Returns:
        Per step a line of kind "step", followed by one of kind "slot" per collective; times in
        seconds.
    """
    slots = slots_by_step(record)
    for window in record.windows:
        own = slots[window.step]
        of_all = slowest.get(window.step, {})
        shared = {slot.key: shared_key(slot.key, record.names) for slot in own}
        latest = {key: of_all[name] for key, name in shared.items() if name in of_all}
        busy = find_busy(own, record.before, window.begin)
        times = analyse(own, busy, latest, window.end)
        where = {**place, "step": window.step}
        row = {"kind": "step", **where, **_step(window, record, times, origin_ns)}
        if record.events is not None:
            row["busy_s"] = [[_seconds(t - origin_ns) for t in part] for part in busy.parts]
        yield row
        for slot_times in times:
            yield {"kind": "slot", **where, **_slot(slot_times, record.names, origin_ns)}


def _step(
    window: Window, record: RankRecord, times: Sequence[SlotTimes], origin_ns: int
) -> dict[str, Any]:
    duration = window.end - window.begin
    row = {
        "n_steps": window.n_steps,
        "begin_s": _seconds(window.begin - origin_ns),
        "step_s": _seconds(duration),
    }
    if record.events is None:
        return row
    t_c, t_b = sum(t.t_c for t in times), sum(t.t_b for t in times)
    return {
        **row,
        "compute_s": _seconds(duration - t_b),
        "exposed_s": _seconds(t_b),
        "waiting_s": _seconds(sum(t.waiting for t in times)),
        "t_c_s": _seconds(t_c),
        "overlap_percent": overlap_percent(t_c, t_b),
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
        "behind_s": _seconds(times.behind),
    }


def _seconds(time_ns: int) -> float:
    return round(time_ns / 1e9, 9)
