"""Files of results: sessions, which say from where runs come, and the runs themselves.

A session is one invocation, or several that continued with the same cells, commit, machine and
versions. Only within a session systems took turns, hence only runs of one session are pairs.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from tfscale.files import write_atomically

Content = dict[str, Any]
# A session continues where these are the same.
_IDENTITY = ("cells", "commit", "machine", "versions")


def read(path: Path) -> Content:
    """Return a file's content: "sessions", descriptions by name, and "runs".

    Older files describe their last invocation only. There each commit, with or without changes, is
    a session, and that of the last invocation has its description.
    """
    content = json.loads(path.read_text())
    if "sessions" in content:
        return content
    runs, last = content.pop("runs"), content
    sessions = {}
    for run in runs:
        run["session"] = str(run["commit"])
        is_last = run["commit"] == last["commit"]
        sessions[run["session"]] = last if is_last else {"commit": run["commit"]}
    return {"sessions": sessions, "runs": runs}


def write(path: Path, content: Content) -> None:
    """Replace a file as a whole: one that is being written when its writer dies would be lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1))


def enter(content: Content, description: dict[str, Any]) -> str:
    """Return the name of the session to continue, or of a new one, which is added.

    Args:
        content: Of a file.
        description: Of this invocation, with "cells", "commit", "machine" and "versions".
    """
    for name, session in content["sessions"].items():
        if all(session.get(key) == description[key] for key in _IDENTITY):
            return name
    name = uuid.uuid4().hex[:12]
    content["sessions"][name] = description
    return name


def key_of(run: dict[str, Any]) -> tuple[str, str, str, str, int]:
    """Return what identifies the cell of a run."""
    return (run["suite"], run["group"], run["system"], run["place"], run["n_ranks"])


def add(content: Content, run: dict[str, Any]) -> None:
    """Add a run in place of those that measured its cell from other code or in another way.

    Medians are over all runs of a cell, so those must not stay. What another commit measured during
    the same session does, unless it is the same round: pairs are made within a commit.
    """

    def is_replaced(old: dict[str, Any]) -> bool:
        if key_of(old) != key_of(run):
            return False
        is_alike = all(old[name] == run[name] for name in ("commit", "arguments"))
        return not is_alike and (old["session"] != run["session"] or old["round"] == run["round"])

    content["runs"] = [old for old in content["runs"] if not is_replaced(old)] + [run]
