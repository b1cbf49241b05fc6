"""Tables of the step suite: one per model and place, with the limits that physics sets."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.numbers import paired_ratio
from benchmarks.rows import IN_TURN, MEMORY, Row, step_limit
from benchmarks.text import milliseconds, ratio_text, table

NAMES = {"compute": "compute only", "horovod": "Horovod", "mwms": "MWMS", "mpi": "MPI's allreduce"}


def name_of(system: str) -> str:
    """Return a system's name for readers."""
    return NAMES.get(system, system.replace("tfscale-", "tfscale "))


def best_of(row: Row) -> str | None:
    """Return our fastest system that trains as one process does, or None where there is none.

    Local SGD is not among them: it computes something else.
    """
    ours = [s for s in row.rounds if s.startswith("tfscale-") and "local" not in s]
    return min(ours, key=row.median_s, default=None)


def summary(rows: Sequence[Row]) -> str:
    """Return one line per model and place: the limit, ours, and how it compares."""
    head = ["model", "where", "limit ms", "fastest of tfscale", "ms", "of limit"]
    lines = []
    for row in rows:
        best = best_of(row)
        if best is None:
            continue
        limit = step_limit(row, "least_bytes")
        line = [row.case, f"{row.place}, {row.n_ranks} ranks"]
        line += ["—" if limit is None else f"{1e3 * limit:.0f}", name_of(best)]
        line += [f"{1e3 * row.median_s(best):.0f}"]
        line += ["—" if limit is None else f"{limit / row.median_s(best):.0%}"]
        others = [ratio_text(row, other, best) for other in ("horovod", "mwms")]
        auto = [ratio_text(row, "horovod", "tfscale-auto"), _prediction(row)]
        lines.append([*line, *others, *auto])
    last = ["Horovod / it", "MWMS / it", "Horovod / auto", "predicted / measured (auto)"]
    return table([*head, *last], lines)


def _prediction(row: Row) -> str:
    """Return the planner's prediction over the median."""
    if "predicted_s" not in row.facts or "tfscale-auto" not in row.rounds:
        return "—"
    return f"{row.facts['predicted_s'] / row.median_s('tfscale-auto'):.2f}"


def group_table(row: Row) -> str:
    """Return a heading with the limits of a group, and a line per system."""
    where = "shared memory" if row.place == MEMORY else row.place
    count = f"{row.facts.get('n_parameters', 0) / 1e6:.1f} million parameters"
    limits = {
        "summing up all gradients": step_limit(row, "allreduce_bytes"),
        "the least bytes": step_limit(row, "least_bytes"),
    }
    told = [f"{1e3 * s:.0f} ms with {name}" for name, s in limits.items() if s is not None]
    limit_line = f" Physical limits: {', '.join(told)}." if told and row.place != MEMORY else ""
    head = ["system", "ms per step", "of compute-only rate", "Horovod / it", "MWMS / it"]
    lines = []
    for system, rounds in row.rounds.items():
        line = [name_of(system), milliseconds([s for one in rounds for s in one])]
        share = "—"
        if "compute" in row.rounds:
            share = f"{paired_ratio(row.rounds['compute'], rounds)[0]:.2f}"
        ratios = [
            "" if system in ("compute", other) else ratio_text(row, other, system)
            for other in ("horovod", "mwms")
        ]
        lines.append([*line, share, *ratios])
    title = f"### {row.case}, {where}, {row.n_ranks} ranks\n\n{count}.{limit_line}\n\n"
    return title + table(head, lines)


def overhead_table(rows: Sequence[Row], suite: str) -> str:
    """Return what the second system of a suite in turn costs; negative means that it was faster."""
    names, lines = IN_TURN[suite], []
    for row in rows:
        first, second = (_by_block(row.rounds[name]) for name in names)
        middle, low, high = paired_ratio(second, first)
        times = [milliseconds([s for one in rounds for s in one]) for rounds in (first, second)]
        text = f"{100 * (middle - 1):+.1f} % ({100 * (low - 1):+.1f}..{100 * (high - 1):+.1f})"
        lines.append([row.group, *times, text])
    return table(["model", *(f"{name} ms" for name in names), "overhead"], lines)


def _by_block(rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return one round per block: blocks of both took turns, so that they are pairs."""
    return [[seconds] for one in rounds for seconds in one]
