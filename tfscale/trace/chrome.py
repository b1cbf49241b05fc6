"""The file format of chrome://tracing and ui.perfetto.dev. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfscale.files import read_json, write_atomically

FILE_NAME = "timeline.json"
_STEPS = 0  # the row of steps; collectives pending together lie in rows 1, 2, ...


class Span(NamedTuple):
    """A named time span on one rank; times in ns."""

    name: str
    begin: int
    end: int


class Collective(NamedTuple):
    """A finished collective; times in ns."""

    name: str
    posted: int
    started: int
    ended: int
    details: dict[str, int]


def rank_events(
    rank: int, spans: Iterable[Span] = (), collectives: Iterable[Collective] = ()
) -> list[dict[str, Any]]:
    """Return the trace entries of one rank, from times of rank 0's clock.

    A collective becomes two bars: from posted to ended, and inside it from started to ended. Spans
    that overlap must be nested.
    """
    entries = [
        _metadata("process_name", rank, 0, f"rank {rank}"),
        _metadata("thread_name", rank, _STEPS, "steps"),
    ]
    entries += [_bar(rank, _STEPS, span.name, span.begin, span.end) for span in spans]
    row_ends: list[int] = []
    for one in sorted(collectives, key=lambda c: (c.posted, -c.ended)):
        row = next((i for i, end in enumerate(row_ends) if end <= one.posted), len(row_ends))
        if row == len(row_ends):
            row_ends.append(0)
            entries.append(_metadata("thread_name", rank, row + 1, f"collectives {row + 1}"))
        row_ends[row] = one.ended
        outer = _bar(rank, row + 1, one.name, one.posted, one.ended)
        inner = _bar(rank, row + 1, "on the wire", one.started, one.ended)
        entries += [{**outer, "args": one.details}, inner]
    return entries


def write_trace(
    path: str | Path,
    entries: Sequence[dict[str, Any]],
    errors_ns: Iterable[float],
    origin_us: float | None = None,
) -> None:
    """Write the entries of all ranks, and the error of each rank's clock.

    Time 0 is `origin_us`, or the time of the first entry.
    """
    first = origin_us
    if first is None:
        first = min((e["ts"] for e in entries if "ts" in e), default=0.0)
    shifted = [{**e, "ts": round(e["ts"] - first, 3)} if "ts" in e else e for e in entries]
    content = {
        "traceEvents": shifted,
        "displayTimeUnit": "ms",
        "otherData": {"clock_error_us": [error / 1e3 for error in errors_ns]},
    }
    write_atomically(path, json.dumps(content))


def merge_parts(directory: str | Path, n_ranks: int | None = None) -> bool:
    """Merge the ranks' parts into `timeline.json` and remove them; return whether it was done.

    With `n_ranks`, the size of the job, only parts of its ranks are merged, and none while one is
    missing or cut; `tfscale report` merges them later. Without it, all readable parts in the folder
    are merged.
    """
    folder = Path(directory)
    if n_ranks is None:
        parts = sorted(_parts(folder), key=_rank_of)
    else:
        parts = [part_path(folder, rank) for rank in range(n_ranks)]
    if not all(part.exists() for part in parts) or (n_ranks is None and not parts):
        return False
    contents = [read_json(part) for part in parts]
    if n_ranks is None:
        contents = [content for content in contents if content]  # without those that were cut
    if not contents or not all(contents):
        return False
    entries = [entry for content in contents for entry in content["traceEvents"]]
    errors = [e * 1e3 for content in contents for e in content["otherData"]["clock_error_us"]]
    write_trace(folder / FILE_NAME, entries, errors)
    for part in parts:
        part.unlink()
    return True


def part_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's part."""
    return folder / f"timeline.rank-{rank}.json"


def remove_stale_parts(folder: Path, n_ranks: int) -> None:
    """Remove parts of ranks that this job does not have, left by a job that was killed.

    All ranks may call this at the same time.
    """
    for part in _parts(folder):
        if _rank_of(part) >= n_ranks:
            part.unlink(missing_ok=True)


def _parts(folder: Path) -> list[Path]:
    return list(folder.glob("timeline.rank-*.json"))


def _rank_of(part: Path) -> int:
    return int(re.findall(r"\d+", part.name)[-1])


def _bar(rank: int, row: int, name: str, begin: int, end: int) -> dict[str, Any]:
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {"name": name, "ph": "X", "pid": rank, "tid": row, **times}


def _metadata(kind: str, rank: int, row: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": text}}
