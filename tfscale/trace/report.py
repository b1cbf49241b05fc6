"""Files of a finished run: a table and a picture."""

from __future__ import annotations

from pathlib import Path

from tfscale.trace import picture
from tfscale.trace.summary import read_rows, table

TABLE_NAME = "communication.md"
PICTURE_NAME = "communication.png"


def write_report(directory: str | Path) -> str:
    """Write `communication.md` and, where matplotlib is installed, `communication.png`.

    Args:
        directory: Folder with `communication.jsonl`; see `tfscale.callbacks.CommunicationReport`.

    Returns:
        The table.

    Raises:
        ConfigError: There is no run with a recorded step, or the file holds something else.
    """
    folder = Path(directory)
    rows = read_rows(folder)
    text = table(rows)
    (folder / TABLE_NAME).write_text(text, encoding="utf-8")
    if picture.has_matplotlib():
        picture.draw_report(rows, folder / PICTURE_NAME)
    return text
