"""Runs of a study that are there as results only: their folders are gone, or on another machine."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import study_runs
from study_runs import Outcome, Run, Study

_OF_RUN = ("configuration", "command", "ranks", "epochs", "waiting", "parts")


def merged(study: Study, every: Sequence[Run], folder: Path, path: Path | None) -> list[Outcome]:
    """Return what is known of the runs of a study, in its order.

    Args:
        study: Which one.
        every: Its runs.
        folder: Where runs have their folders; what is finished there counts.
        path: `<study>.json` of earlier results, for the others; None: without.

    Raises:
        SystemExit: That file cannot be read.
    """
    found = {outcome.run.folder: outcome for outcome in study_runs.outcomes(study, folder)}
    kept = {outcome.run.folder: outcome for outcome in _published(every, path)}
    known = {**kept, **found}
    return [known[run.folder] for run in every if run.folder in known]


def _published(every: Sequence[Run], path: Path | None) -> list[Outcome]:
    """Return the runs of a file of results that were made with the flags they have now."""
    if path is None or not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["runs"]
        outcomes = []
        for run in every:
            own = (run.configuration, " ".join(study_runs.command(run)), run.ranks)
            for row in rows:
                if own == tuple(row[key] for key in _OF_RUN[:3]):
                    outcomes.append(_outcome(run, row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"--keep needs results as study.py writes them. Received: {path}: {error!r}.")
    return outcomes


def _outcome(run: Run, row: dict) -> Outcome:
    made = row.get("parts") or [{key: row[key] for key in row if key not in _OF_RUN}]
    return Outcome(run, row["epochs"], [row["waiting"]] if "waiting" in row else [], made)
