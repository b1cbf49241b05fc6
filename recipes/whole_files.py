"""Files that are whole at any moment, whatever ends the process that writes them."""

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Replace a file: who reads it sees the former text or the new one, never a part.

    Args:
        path: Of the file; one beside it, with `.new` added, is there while this writes.
        text: All that it is to hold.

    Raises:
        OSError: The folder cannot be written.
    """
    aside = aside_of(path)
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def aside_of(path: Path) -> Path:
    """Return the file in which the new text of another one is prepared."""
    return path.with_name(f"{path.name}.new")
