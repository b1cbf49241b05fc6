"""The table of a run: what `communication.jsonl` says, on one page."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfscale.errors import ConfigError
from tfscale.tables import grid
from tfscale.trace.analysis import overlap_percent

FILE_NAME = "communication.jsonl"
N_SLOTS = 20  # shown, those that block longest
Row = dict[str, Any]


def read_rows(directory: str | Path) -> list[Row]:
    """Return the lines of a run.

    Args:
        directory: What was given to `CommunicationReport`.

    Raises:
        ConfigError: There is no run with a recorded step, or the file holds something else.
    """
    path = Path(directory) / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"A folder with {FILE_NAME} is needed. Received: {directory}. Train with "
            "tfscale.callbacks.CommunicationReport(directory) first."
        ) from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or "kind" not in row:
                raise ValueError("not a line of ours")
            rows.append(row)
        except ValueError as error:
            if number == len(lines):
                break  # a run that was killed has cut it
            raise ConfigError(
                f"{FILE_NAME} must hold a JSON object per line. Received: {line[:40]!r} in line "
                f"{number} of {path}. Train again with CommunicationReport(directory)."
            ) from error
    if not any(row["kind"] == "step" for row in rows):
        raise ConfigError(
            f"A run must have recorded a step. Received: none in {path}. Choose a smaller "
            "every_n_steps; the first step of a fit is never recorded."
        )
    return rows


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """Return the lines of one kind: "run", "step", "slot" or "memory"."""
    return [row for row in rows if row["kind"] == kind]


def table(rows: Sequence[Row]) -> str:
    """Return a page of Markdown.

    Args:
        rows: Lines of a run; see `tfscale.trace.records.rows`.
    """
    run, steps = of_kind(rows, "run")[0], of_kind(rows, "step")
    n_recorded = len({(s["epoch"], s["step"]) for s in steps})
    lines = [
        "# Communication",
        "",
        f"{run['size']} ranks, backend {run['backend']}, {n_recorded} recorded steps. "
        "Times in ms per step: medians over the recorded steps.",
        "",
    ]
    if "exposed_s" not in steps[0]:
        lines += [
            "This backend records no collectives, so only step times are known.",
            "",
            *grid(["rank", "step"], [[r, _ms(_median(own, "step_s"))] for r, own in _ranks(steps)]),
        ]
        return "\n".join([*lines, "", *_memory_lines(rows)])
    lines += _ranks_grid(steps)
    lines += [
        "",
        "step = compute + exposed; waiting is the part of exposed before the slowest rank began.",
        "R = 100 * sum(T_c - T_b) / sum(T_c): the share of communication that is hidden.",
        "",
        f"## Collectives of rank 0, the {N_SLOTS} that block longest",
        "",
        *_slots_grid([slot for slot in of_kind(rows, "slot") if slot["rank"] == 0]),
        "",
        f"Clocks of the ranks agree to {1e6 * max(run['clock_error_s']):.0f} microseconds.",
        "",
        *_memory_lines(rows),
    ]
    return "\n".join(lines)


def _memory_lines(rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in of_kind(rows, "memory"):
        shares = ", ".join(f"{n_bytes / 1e6:.2f}" for n_bytes in row["state"])
        complete = row["complete_state"] / 1e6
        lines += [f"Optimizer state per rank: {shares} MB; in one process {complete:.2f} MB.", ""]
    return lines


def _ranks_grid(steps: Sequence[Row]) -> list[str]:
    head = ["rank", "step", "compute", "exposed", "waiting", "communication", "R %", "MB"]
    body = []
    for rank, own in [*_ranks(steps), ("all", list(steps))]:
        exposed, total = (_sum(own, key) for key in ("exposed_s", "t_c_s"))
        share = overlap_percent(total, exposed)
        names = ("step_s", "compute_s", "exposed_s", "waiting_s", "t_c_s")
        times = [_ms(_median(own, name)) for name in names]
        n_bytes = statistics.median(s["bytes"] / s["n_steps"] for s in own)
        shown = "-" if share is None else f"{share:.1f}"
        body.append([rank, *times, shown, f"{n_bytes / 1e6:.2f}"])
    return grid(head, body)


def _slots_grid(slots: Sequence[Row]) -> list[str]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for slot in slots:
        groups[slot["plan"], slot["slot"], slot["name"]].append(slot)

    def blocks(own: list[Row]) -> float:
        return statistics.median(s["t_b_s"] for s in own)

    chosen = sorted(groups.items(), key=lambda item: -blocks(item[1]))[:N_SLOTS]
    head = ["slot", "name", "KB", "took", "T_c", "T_b", "waiting", "behind"]
    body = []
    for (plan, slot, name), own in chosen:
        took = statistics.median(s["ended_s"] - s["started_s"] for s in own)
        names = ("t_c_s", "t_b_s", "waiting_s", "behind_s")
        times = [_ms(took), *(_ms(statistics.median(s[key] for s in own)) for key in names)]
        n_bytes = statistics.median(s["bytes"] for s in own)
        body.append([f"{plan}.{slot}", name, f"{n_bytes / 1e3:.1f}", *times])
    return grid(head, body)


def _ranks(steps: Sequence[Row]) -> list[tuple[Any, list[Row]]]:
    ranks = sorted({step["rank"] for step in steps})
    return [(rank, [s for s in steps if s["rank"] == rank]) for rank in ranks]


def _sum(steps: Sequence[Row], name: str) -> float:
    return sum(step[name] for step in steps)


def _median(steps: Sequence[Row], name: str) -> float:
    return statistics.median(step[name] / step["n_steps"] for step in steps)


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.2f}"
