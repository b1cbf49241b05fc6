"""Report of recorded steps: a table and a picture of `communication.jsonl`."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfscale.config import ConfigError
from tfscale.files import has_matplotlib, read_json_lines
from tfscale.measure.analysis import Intervals, overlap_percent
from tfscale.plan.forecast import grid

FILE_NAME = "communication.jsonl"
Row = dict[str, Any]


def read_rows(directory: str | Path) -> list[Row]:
    """Return the lines of a run, given the folder of `CommunicationReport`."""
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            f"directory must hold {FILE_NAME}. Received: {directory}. Train with "
            "tfscale.callbacks.CommunicationReport(directory) first."
        )
    rows = [row for row in read_json_lines(path) if isinstance(row, dict) and "kind" in row]
    if not any(row["kind"] == "step" for row in rows):
        raise ConfigError(
            f"No step was recorded. Received: none in {path}. Choose a smaller every_n_steps; "
            "the first step of a fit is never recorded."
        )
    return rows


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """Return the lines of one kind: "run", "step", "slot" or "memory"."""
    return [row for row in rows if row["kind"] == kind]


def write_report(directory: str | Path) -> str:
    """Write `communication.md`, and `communication.png` with matplotlib; return the table."""
    folder = Path(directory)
    rows = read_rows(folder)
    text = table(rows)
    (folder / "communication.md").write_text(text, encoding="utf-8")
    if has_matplotlib():
        _draw_report(rows, folder / "communication.png")
    return text


# The table

_N_SLOTS = 20  # collectives shown, those that block longest


def table(rows: Sequence[Row]) -> str:
    """Return a page of Markdown for the lines of a run, see `tfscale.measure.analysis.rows`."""
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
            *grid(["rank", "step"], [[r, _ms(_median(of, "step_s"))] for r, of in _ranks(steps)]),
        ]
        return "\n".join([*lines, "", *_memory_lines(rows)])
    lines += _ranks_grid(steps)
    lines += [
        "",
        "step = input + compute + forward + exposed. Input: until the batch exists. Forward: "
        "layers wait for parameters that the step before has sent (`Sharded`). Waiting is the part "
        "of exposed before the slowest rank began.",
        "R = 100 * sum(T_c - T_b) / sum(T_c), forward in T_b: the share of communication that "
        "is hidden.",
        "",
        f"## Collectives of rank 0, the {_N_SLOTS} that block longest",
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


_TIMES = (*("step_s", "input_s", "compute_s", "forward_wait_s", "exposed_s", "waiting_s"), "t_c_s")


def _ranks_grid(steps: Sequence[Row]) -> list[str]:
    head = ["rank", "step", "input", "compute", "forward", "exposed", "waiting", "communication"]
    body = []
    for rank, rank_steps in [*_ranks(steps), ("all", list(steps))]:
        blocked_s = sum(s["exposed_s"] + s.get("forward_wait_s", 0.0) for s in rank_steps)
        total_s = sum(s["t_c_s"] for s in rank_steps)
        share = overlap_percent(total_s, min(blocked_s, total_s))
        times = [_ms(_median(rank_steps, name)) for name in _TIMES]
        n_bytes = statistics.median(s["bytes"] / s["n_steps"] for s in rank_steps)
        shown = "-" if share is None else f"{share:.1f}"
        body.append([rank, *times, shown, f"{n_bytes / 1e6:.2f}"])
    return grid([*head, "R %", "MB"], body)


def _slots_grid(slots: Sequence[Row]) -> list[str]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for slot in slots:
        groups[slot["plan"], slot["slot"], slot["name"]].append(slot)
    ordered = sorted(groups.items(), key=lambda g: -statistics.median(s["t_b_s"] for s in g[1]))
    head = ["slot", "name", "KB", "took", "T_c", "T_b", "waiting", "lead"]
    body = []
    for (plan, slot, name), slot_rows in ordered[:_N_SLOTS]:
        took = statistics.median(s["ended_s"] - s["started_s"] for s in slot_rows)
        names = ("t_c_s", "t_b_s", "waiting_s", "lead_s")
        times = [_ms(took), *(_ms(statistics.median(s[key] for s in slot_rows)) for key in names)]
        n_bytes = statistics.median(s["bytes"] for s in slot_rows)
        body.append([f"{plan}.{slot}", name, f"{n_bytes / 1e3:.1f}", *times])
    return grid(head, body)


def _ranks(steps: Sequence[Row]) -> list[tuple[Any, list[Row]]]:
    ranks = sorted({step["rank"] for step in steps})
    return [(rank, [s for s in steps if s["rank"] == rank]) for rank in ranks]


def _median(steps: Sequence[Row], name: str) -> float:
    return statistics.median(step.get(name, 0.0) / step["n_steps"] for step in steps)


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.2f}"


# The picture

_COMPUTE, _WAITING, _EXPOSED, _HIDDEN, _QUEUED = "#4c78a8", "#f2cf5b", "#e45756", "#72b7b2", "0.8"
_INPUT, _FORWARD = "#54a24b", "#b279a2"
_MAX_RANKS = 8  # in the timeline


def _draw_report(rows: Sequence[Row], path: Path) -> None:
    """Draw the shares of each rank's step time, and one typical step."""
    from matplotlib.figure import Figure

    steps = of_kind(rows, "step")
    if "exposed_s" not in steps[0]:
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        _draw_step_times(figure.subplots(), steps)
    else:
        n_shown = min(len({s["rank"] for s in steps}), _MAX_RANKS)
        figure = Figure(figsize=(9.6, 4.0 + 1.3 * n_shown), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[3, 1 + 1.3 * n_shown])
        above, right = parts[0].subplots(1, 2)
        _draw_shares(above, steps)
        _draw_step_times(right, steps)
        draw_step(parts[1].subplots(), rows, _typical_step(steps))
    figure.savefig(path, dpi=120)


def _typical_step(steps: Sequence[Row]) -> tuple[int, int]:
    """Return epoch and number of the step with the median time on rank 0."""
    steps_of_rank_0 = sorted((s for s in steps if s["rank"] == 0), key=lambda s: s["step_s"])
    middle = steps_of_rank_0[len(steps_of_rank_0) // 2]
    return middle["epoch"], middle["step"]


def draw_step(axes: Any, rows: Sequence[Row], epoch_and_step: tuple[int, int]) -> None:
    """Draw a step (`epoch_and_step`) of all ranks: a row of computation, one per collective."""
    chosen = [r for r in rows if (r.get("epoch"), r.get("step")) == epoch_and_step]
    steps = [s for s in of_kind(chosen, "step") if s["rank"] < _MAX_RANKS]
    origin = min(step["begin_s"] for step in steps)
    position, ticks = 0.0, []
    for step in steps:
        slots = [s for s in of_kind(chosen, "slot") if s["rank"] == step["rank"]]
        _draw_compute(axes, step, slots, position, origin)
        slots.sort(key=lambda s: s["posted_s"])
        ticks.append((position, f"rank {step['rank']} computes"))
        for slot in slots:
            position -= 1
            _draw_slot(axes, slot, position, origin)
            ticks.append((position, f"{_short(slot['name'])}, {_size(slot['bytes'])}"))
        position -= 1.6
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=7)
    epoch, number = epoch_and_step
    axes.set_xlabel(f"ms since the begin of step {number} of epoch {epoch + 1}")
    axes.grid(axis="x", alpha=0.3)
    _legend(axes)


def _draw_compute(axes: Any, step: Row, slots: Sequence[Row], at: float, origin: float) -> None:
    """Draw the step, and inside it the times in which the rank is blocked."""
    left = 1e3 * (step["begin_s"] - origin)
    axes.barh(at, 1e3 * step["step_s"], left=left, height=0.8, color=_COMPUTE)
    for name, color in (("input_at_s", _INPUT), ("forward_at_s", _FORWARD)):
        for begin, end in step.get(name, ()):
            axes.barh(at, 1e3 * (end - begin), left=1e3 * (begin - origin), height=0.8, color=color)
    busy = Intervals((begin, end) for begin, end in step["busy_s"])
    for slot in slots:  # in the order in which they ended, as in `analyse`
        for begin, end in busy.add(slot["posted_s"], slot["ended_s"]):
            if slot["t_b_s"] == 0:
                continue
            left = 1e3 * (begin - origin)
            axes.barh(at, 1e3 * (end - begin), left=left, height=0.8, color=_EXPOSED)
            waiting = min(end, slot["started_s"] + slot["lead_s"]) - max(begin, slot["started_s"])
            left = 1e3 * (max(begin, slot["started_s"]) - origin)
            axes.barh(at, 1e3 * max(waiting, 0), left=left, height=0.8, color=_WAITING)


def _draw_slot(axes: Any, slot: Row, at: float, origin: float) -> None:
    times = [1e3 * (slot[f"{name}_s"] - origin) for name in ("posted", "started", "ended")]
    posted, started, ended = times
    axes.barh(at, started - posted, left=posted, height=0.3, color=_QUEUED)
    axes.barh(at, ended - started, left=started, height=0.6, color=_HIDDEN)


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    shown = {
        "compute": _COMPUTE,
        "input": _INPUT,
        "forward pass waits": _FORWARD,
        "waiting for the slowest rank": _WAITING,
        "blocked by communication": _EXPOSED,
        "on the wire": _HIDDEN,
        "posted, not started": _QUEUED,
    }
    handles = [Patch(color=color, label=label) for label, color in shown.items()]
    above_axes = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(handles=handles, ncols=4, fontsize=7, frameon=False, **above_axes)


def _draw_shares(axes: Any, steps: Sequence[Row]) -> None:
    """Draw the parts of the median step of each rank."""
    ranks = _ranks(steps)
    places = [rank for rank, _ in ranks]
    bottom = [0.0] * len(ranks)
    for label, color, value in (
        ("input", _INPUT, lambda s: s.get("input_s", 0.0)),
        ("compute", _COMPUTE, lambda s: s["compute_s"]),
        ("forward pass waits", _FORWARD, lambda s: s.get("forward_wait_s", 0.0)),
        ("waiting", _WAITING, lambda s: s["waiting_s"]),
        ("transfer", _EXPOSED, lambda s: s["exposed_s"] - s["waiting_s"]),
    ):
        heights = [
            1e3 * statistics.median(value(s) / s["n_steps"] for s in own) for _, own in ranks
        ]
        axes.bar(places, heights, bottom=bottom, color=color, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(xticks=places, xlabel="rank", ylabel="ms per step")
    axes.legend(fontsize=7)


def _draw_step_times(axes: Any, steps: Sequence[Row]) -> None:
    for rank, rank_steps in _ranks(steps)[:_MAX_RANKS]:
        times = [1e3 * s["step_s"] / s["n_steps"] for s in rank_steps]
        axes.plot(range(len(rank_steps)), times, lw=1, label=f"rank {rank}")
    axes.set(ylim=(0, None), xlabel="recorded step", ylabel="ms per step")
    axes.legend(fontsize=7)


def _short(name: str, n_letters: int = 44) -> str:
    name = re.sub(r"\w+/(?=\w+/)", "", name)  # scopes around a layer
    return name if len(name) <= n_letters else f"{name[: n_letters - 1]}…"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.1f} KB"
