"""Measurements that are older than the engine: `make release-check`, before a release.

    python tools/release_check.py [FILE ...]

For each file of results that `python -m benchmarks` wrote, by default those directly in docs/, a
line per suite and place: how many runs there are, and how many of them are old. Old runs were
measured before the last commit that changed `custom_ops/comm`, by changed files ("+" after the
commit), or by a commit that is not in this history. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE = "custom_ops/comm"


def last_change(folder: str, root: Path = ROOT) -> str:
    """The last commit that changed a folder."""
    return _git(root, "log", "-1", "--format=%H", "--", folder).stdout.strip()


def has(commit: str, change: str, root: Path = ROOT) -> bool:
    """True if a known commit contains the change, and no file was changed besides ("+")."""
    return _git(root, "merge-base", "--is-ancestor", change, commit).returncode == 0


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)


def old_runs(
    runs: Sequence[Mapping[str, Any]], is_new: Mapping[str, bool]
) -> list[tuple[str, str, int, int]]:
    """Suite, place, runs and old runs of a file, by suite and place.

    Args:
        runs: As `python -m benchmarks` writes them.
        is_new: By commit.
    """
    places = [(run["suite"], run["place"]) for run in runs]
    old = Counter(
        place for place, run in zip(places, runs, strict=True) if not is_new[run["commit"]]
    )
    return [(*place, n, old[place]) for place, n in sorted(Counter(places).items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a run is old."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    change = last_change(ENGINE)
    print(f"The last change of {ENGINE}: {change[:8]}")
    n_old = 0
    for path in options.files or sorted((ROOT / "docs").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "sessions" not in content:
            continue
        runs = content["runs"]
        is_new = {commit: has(commit, change) for commit in {run["commit"] for run in runs}}
        print(f"\n{path.name}")
        for suite, place, n_runs, n_old_runs in old_runs(runs, is_new):
            text = f"{n_old_runs} of {n_runs} are older" if n_old_runs else f"{n_runs} runs"
            print(f"  {suite:12} {place:24} {text}")
            n_old += n_old_runs
    print(f"\n{n_old} runs must be measured again." if n_old else "\nAll are of this engine.")
    return 1 if n_old else 0


if __name__ == "__main__":
    sys.exit(main())
