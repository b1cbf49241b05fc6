"""Tables of two ranks with a core each, beside one process with one core, or with both."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.markdown import milliseconds, ratio_text, table
from benchmarks.rows import Row, systems_of
from benchmarks.step_tables import name_of

_ALONE = {"one-core": "one core, half the batch", "both-cores": "both cores, the whole batch"}


def speedup_table(rows: Sequence[Row]) -> str:
    """A line per model and system: ms per step, and what one process takes over it.

    One process with half of the batch does what each rank does, so 1 is a perfect speedup of 2.
    """
    lines = []
    for row in rows:
        for system in systems_of([row]):
            ratios = [ratio_text(row, alone, system) if system != alone else "" for alone in _ALONE]
            name = _ALONE.get(system) or f"2 ranks, {name_of(system)}"
            lines.append([row.case, name, milliseconds(row.samples(system)), *ratios])
    head = ["model", "system", "ms per step", *(f"{name} / it" for name in _ALONE.values())]
    return table(head, lines)
