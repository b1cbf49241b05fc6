"""Times of TensorFlow's kernels, from its profiler."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfscale.trace.events import clock_ns

Span = tuple[int, int]  # begin and end, in ns

FORWARD, BACKWARD = "forward", "backward"
_CLOCK = "tfscale's clock"
_N_MARKS = 5  # the process may be off the core between two times


def kernels_of(model_name: str, run: Callable[[], None]) -> dict[str, list[Span]]:
    """Run training steps under the profiler and return when their kernels ran.

    Args:
        model_name: Of the model: TensorFlow's scope of the forward pass.
        run: The steps.

    Returns:
        `FORWARD` and `BACKWARD`: spans in the times of `clock_ns`, in no order.
    """
    with tempfile.TemporaryDirectory(prefix="tfscale-profile-") as folder:
        with tf.profiler.experimental.Profile(folder):
            marks = [_mark() for _ in range(_N_MARKS)]
            run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        events = list(_events(path.read_bytes()))
    # The profiler has a clock of its own.
    seen = sorted(begin for name, begin, _ in events if name == _CLOCK)
    pairs = zip(marks, seen, strict=True)
    (before, after), begin = min(pairs, key=lambda pair: pair[0][1] - pair[0][0])
    return by_pass(model_name, events, (before + after) // 2 - begin)


def _mark() -> Span:
    """Let the profiler note an event; return the times of `clock_ns` between which it began."""
    before = clock_ns()
    with tf.profiler.experimental.Trace(_CLOCK):
        return before, clock_ns()


def by_pass(
    model_name: str, events: Iterable[tuple[str, int, int]], offset: int
) -> dict[str, list[Span]]:
    """Return the kernels of each pass by the names that TensorFlow gave them.

    What waits for the network is none of the passes' work.

    Args:
        model_name: Of the model: TensorFlow's scope of the forward pass.
        events: Name, begin and end; a kernel's name is "path:type".
        offset: What is added to the times.
    """
    passes = {model_name: FORWARD, "gradient_tape": BACKWARD}
    spans: dict[str, list[Span]] = {FORWARD: [], BACKWARD: []}
    for name, begin, end in events:
        path, _, kind = name.rpartition(":")
        if not path or kind.startswith("Tfscale"):
            continue
        scope = path.split("/")[0]
        # A model that is traced again has a number after its name.
        which = passes.get(scope) or passes.get(re.sub(r"_\d+$", "", scope))
        if which is not None:
            spans[which].append((begin + offset, end + offset))
    return spans


def _events(content: bytes) -> Iterator[tuple[str, int, int]]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space: Any = xplane_pb2.XSpace()
    space.ParseFromString(content)
    for plane in space.planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns + event.offset_ps // 1000
                yield names[event.metadata_id], begin, begin + event.duration_ps // 1000
