"""What an allreduce costs between all ranks: however short it is, and per byte."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import tensorflow as tf

from tfscale import collectives, objects
from tfscale.plan.specs import BYTES_PER_VALUE
from tfscale.trace.recorder import Listener, has_events

_SHORT, _LONG = 2**10, 2**20  # values
_REPEATS = 5
_MOST_OVERLAP = 10.0  # messages that are under way at once, as far as can be told


def measure_messages() -> tuple[float, float]:
    """Return seconds of a short allreduce, and seconds per byte of a longer one. Collective.

    One message at a time, on the main thread; of the rank that waited least.
    """
    short_s, long_s = (_duration_s(n_values) for n_values in (_SHORT, _LONG))
    per_byte = (long_s - short_s) / ((_LONG - _SHORT) * BYTES_PER_VALUE)
    return short_s, max(per_byte, long_s / (_LONG * BYTES_PER_VALUE) / _MOST_OVERLAP)


def _duration_s(n_values: int) -> float:
    values, name = tf.ones([n_values]), f"speed of messages of {n_values} values"
    # Traced: an eager call would first compare what the ranks are about to do.
    run = tf.function(lambda: collectives.allreduce(values, name=name), autograph=False)
    run()
    own = _recorded(run) if has_events() else _clocked(run)
    every = objects.allgather_object(own, name="times of messages")
    return statistics.median(map(min, zip(*every, strict=True)))


def _recorded(run: Callable[[], Any]) -> list[float]:
    listener = Listener()
    for _ in range(_REPEATS):
        run()
    events = listener.take()
    listener.close()
    return [float(e["ended_ns"] - e["started_ns"]) / 1e9 for e in events if e["slot"] >= 0]


def _clocked(run: Callable[[], Any]) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(_REPEATS):
        run()
        times.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(times)]


def fitted(
    messages: tuple[float, float], n_messages: int, n_bytes: float, wire_s: float
) -> tuple[float, float]:
    """Return what messages and bytes cost where many messages follow each other.

    Args:
        messages: Of `measure_messages`.
        n_messages: One behind the other.
        n_bytes: Of all of them.
        wire_s: How long they took together.

    Returns:
        Seconds per message and per byte that add up to `wire_s`: several messages are under way
        at once, so a message may cost less than one that travels alone; what is left is the bytes'.
    """
    short_s, per_byte = messages
    each_s = (wire_s - n_bytes * per_byte) / n_messages
    each_s = min(short_s, max(each_s, short_s / _MOST_OVERLAP), wire_s / (2 * n_messages))
    return each_s, (wire_s - n_messages * each_s) / n_bytes
