"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def grid(
    head: Sequence[str], body: Sequence[Sequence[Any]], text: Sequence[str] = ("name",)
) -> list[str]:
    """Return the lines of a table.

    Args:
        head: Names of the columns.
        body: Cells per row; what `str` makes of them is shown.
        text: Names of the columns that hold words and are aligned left.
    """
    cells = [list(head), *([str(cell).replace("|", "/") for cell in row] for row in body)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    is_text = [column in text for column in head]
    align: list[Callable[[str, int], str]] = [str.ljust if t else str.rjust for t in is_text]
    lines = [
        "| " + " | ".join(align[i](cell, widths[i]) for i, cell in enumerate(row)) + " |"
        for row in cells
    ]
    rule = [
        ":" + "-" * max(w - 1, 2) if t else "-" * max(w - 1, 2) + ":"
        for w, t in zip(widths, is_text, strict=True)
    ]
    return [lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]
