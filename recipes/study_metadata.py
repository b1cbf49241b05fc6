"""`study.json` of a run: with which flags it was made, by which commits, on which machines."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfscale.files import UNFINISHED, write_atomically

_NAME = "study.json"


def read(folder: Path) -> dict[str, Any]:
    """Return the note of a run, with `key` at least; empty where nothing has been run.

    Args:
        folder: Of the run.

    Raises:
        SystemExit: There is something in the folder, but no note that says of which flags.
    """
    path = folder / _NAME
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(note, dict) and isinstance(note.get("key"), str):
            return note
        problem = 'it has no "key"'
    except FileNotFoundError:
        rest = {other.name for other in folder.glob("*")} - {path.name + UNFINISHED}
        if not rest:
            return {}
        problem = f"it is missing beside {', '.join(sorted(rest)[:3])}"
    except (OSError, ValueError) as error:
        problem = str(error)
    sys.exit(
        "A run is continued or replaced only if its study.json tells with which flags it was "
        f"begun. Received: {path}: {problem}. Restore that file, or move {folder} away to run "
        "this configuration again."
    )


def write(folder: Path, key: str, made: Mapping[str, str]) -> None:
    """Note that a run begins or resumes.

    What was noted before stays, since those epochs are still part of the result; an attempt that
    finished no epoch has made nothing of it.

    Args:
        folder: Of the run.
        key: What its command is recognised by.
        made: By what this part of it is made, see `tfscale.measure.provenance`.
    """
    metrics = folder / "metrics.jsonl"
    has_epochs = metrics.exists() and metrics.stat().st_size > 0
    every = [*(parts(read(folder)) if has_epochs else []), dict(made)]
    note = {"key": key, **made, **({"parts": every} if len(every) > 1 else {})}
    write_atomically(folder / _NAME, json.dumps(note, indent=2) + "\n")


def parts(note: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what made each part of a run, oldest first.

    Args:
        note: From `read`. Of a run in one part it holds commit, machine and so on itself; of
            others it holds the last part's, and all of them under `parts`.
    """
    own = {name: str(value) for name, value in note.items() if name not in ("key", "parts")}
    return note.get("parts") or ([own] if own else [])
