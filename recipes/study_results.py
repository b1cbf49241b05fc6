"""Runs of a study that are there as results only: their folders are gone, or on another machine."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import study_runs
from study_runs import Outcome, Run

_OF_RUN = ("configuration", "command", "ranks", "epochs", "waiting", "parts", "theta")


def read(every: Sequence[Run], path: Path) -> dict[Path, Outcome]:
    """Return the runs of a file of results that were made with the flags they have now.

    Args:
        every: Runs of the study.
        path: `<study>.json` of earlier results; none of them are known where it is missing.

    Returns:
        Outcomes by the folders of their runs.

    Raises:
        SystemExit: That file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["runs"]
        known = {tuple(row[key] for key in _OF_RUN[:3]): row for row in rows}
        outcomes = {}
        for run in every:
            row = known.get((run.configuration, " ".join(study_runs.command(run)), run.ranks))
            if row is not None:
                outcomes[run.folder] = _outcome(run, row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"--keep needs results as study.py writes them. Received: {path}: {error!r}.")
    return outcomes


def note_of(path: Path) -> str:
    """Return the sentence under the table of earlier results."""
    return str(json.loads(path.read_text(encoding="utf-8")).get("note", ""))


def _outcome(run: Run, row: dict) -> Outcome:
    made = row.get("parts") or [{key: row[key] for key in row if key not in _OF_RUN}]
    steps = [row["waiting"]] if "waiting" in row else []
    return Outcome(run, row["epochs"], steps, made, row.get("theta", {}))
