"""A timeline of all ranks' collectives, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from tfscale.comm import objects, runtime
from tfscale.config import ExchangeError
from tfscale.trace import chrome
from tfscale.trace import events as recorder
from tfscale.trace.chrome import FILE_NAME, Collective, Span, part_path, write_trace
from tfscale.trace.events import ClockMap

logger = logging.getLogger("tfscale")
_DRAIN_S = 2.0  # the engine keeps 65,536 collectives


class _Recording:
    """A timeline of this rank that is being recorded."""

    def __init__(self, path: Path, is_automatic: bool) -> None:
        """Begin to record. Collective."""
        self.path, self.is_automatic = path, is_automatic
        self.spans: list[Span] = []
        self.clocks = ClockMap()
        self._listener = recorder.Listener() if recorder.has_events() else None
        self._is_over = threading.Event()
        if self._listener is not None:
            threading.Thread(target=self._drain, name="tfscale timeline", daemon=True).start()

    def _drain(self) -> None:
        while not self._is_over.wait(_DRAIN_S):
            if runtime.is_initialized():
                recorder.drain()

    def finish(self) -> tuple[list[dict[str, Any]], int]:
        """End the recording; return this rank's entries and the error of its clock in ns."""
        self._is_over.set()
        clock = self.clocks.to_rank_zero
        spans = [Span(s.name, int(clock(s.begin)), int(clock(s.end))) for s in self.spans]
        collectives = []
        if self._listener is not None:
            events = self._listener.take()
            events = events[events["slot"] >= 0]
            self._listener.close()
            names = ("posted_ns", "started_ns", "ended_ns")
            times = [clock(events[name]).tolist() for name in names]
            for event, posted, started, ended in zip(events, *times, strict=True):
                name = runtime.backend().slot_name(int(event["plan"]), int(event["slot"]))
                details = {key: int(event[key]) for key in ("bytes", "plan", "slot", "execution")}
                collectives.append(Collective(name, posted, started, ended, details))
        return chrome.rank_events(runtime.rank(), spans, collectives), self.clocks.error_ns


_recording: _Recording | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start recording a timeline. Collective: all ranks must call this.

    Args:
        file_path: JSON file that rank 0 writes at `stop_timeline`.
        mark_cycles: Ignored; there are no cycles.

    Raises:
        ExchangeError: A timeline is being recorded already.

    Examples:
        >>> import os
        >>> tfscale.init()
        >>> tfscale.start_timeline("timeline.json")
        >>> total = tfscale.allreduce(tf.ones([8]), name="total")
        >>> tfscale.stop_timeline()
        >>> os.listdir()  # open it in ui.perfetto.dev
        ['timeline.json']
    """
    _start(Path(file_path), is_automatic=False)


def stop_timeline() -> None:
    """Write the timeline of all ranks into the file of `start_timeline`. Collective.

    All times are those of rank 0's clock; `clock_error_us` in the file bounds the error of times
    from other hosts.

    Raises:
        ExchangeError: No timeline is being recorded.

    Examples:
        >>> import json
        >>> tfscale.init()
        >>> tfscale.start_timeline("timeline.json")
        >>> tfscale.stop_timeline()
        >>> with open("timeline.json") as file:
        ...     print(json.load(file)["otherData"])
        {'clock_error_us': [0.0]}
    """
    global _recording
    if _recording is None:
        raise ExchangeError(
            "stop_timeline() needs an open timeline. Received: a call without one. Call "
            "start_timeline(path) first."
        )
    recording, _recording = _recording, None
    recording.clocks.measure()
    records = objects.allgather_object(recording.finish(), name="timeline")
    if runtime.rank() == 0:
        entries = [entry for rank, _ in records for entry in rank]
        write_trace(recording.path, entries, [error for _, error in records])


def note_span(name: str, begin_ns: int, end_ns: int) -> None:
    """Add a bar to the timeline, if one is being recorded; times by `events.clock_ns`."""
    if _recording is not None:
        _recording.spans.append(Span(name, begin_ns, end_ns))


def start_automatic(directory: str) -> None:
    """Begin the timeline of a whole job, TFSCALE_TIMELINE. Collective."""
    folder = Path(directory).absolute()  # The program may change its directory.
    folder.mkdir(parents=True, exist_ok=True)
    part_path(folder, runtime.rank()).unlink(missing_ok=True)
    chrome.remove_stale_parts(folder, runtime.size())
    _start(folder / FILE_NAME, is_automatic=True)


def write_part() -> Path | None:
    """Write this rank's part of the job's timeline, before it leaves; return the folder.

    Not collective: a rank may leave while others still train, and they must be notified. Returns
    None without such a timeline, or if it cannot be written.
    """
    global _recording
    recording, _recording = _recording, None
    if recording is None or not recording.is_automatic:
        return None
    folder, rank = recording.path.parent, runtime.rank()
    entries, error_ns = recording.finish()
    try:
        write_trace(part_path(folder, rank), entries, [error_ns], origin_us=0.0)
    except OSError as error:  # The others wait for this rank to leave.
        logger.warning("The timeline of rank %d cannot be written: %s", rank, error)
        return None
    return folder


def merge_at_end(folder: Path, n_ranks: int) -> None:
    """Merge the parts of all ranks, where that is possible; `tfscale report` may do it later."""
    try:
        chrome.merge_parts(folder, n_ranks)
    except OSError as error:
        logger.warning("The timeline cannot be written: %s", error)


def _start(path: Path, is_automatic: bool) -> None:
    global _recording
    if _recording is not None:
        raise ExchangeError(
            f"Two timelines cannot run at once. Received: file_path={str(path)!r} while "
            f"{str(_recording.path)!r} is open. Call stop_timeline() first, or unset "
            "TFSCALE_TIMELINE."
        )
    _recording = _Recording(path, is_automatic)
