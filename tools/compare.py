"""Compare two files of benchmark results: `python tools/compare.py old.json new.json`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import sessions
from benchmarks.numbers import Spread, spread
from benchmarks.rows import IN_TURN

Key = tuple[str, str, str, str]


def medians(content: dict[str, Any]) -> dict[Key, Spread]:
    """Return the spread of each (suite, group, case, system) over all rounds."""
    samples: dict[Key, list[float]] = {}
    for run in content["runs"]:
        for case, seconds in run.get("samples", {}).items():
            key = (run["suite"], run["group"], case, run["system"])
            samples.setdefault(key, []).extend(seconds)
    return {key: spread(seconds) for key, seconds in samples.items()}


def compare(old: dict[str, Any], new: dict[str, Any], threshold: float) -> tuple[list[str], bool]:
    """Compare what both files have, and name what failed or is missing in the later one.

    Args:
        old: Content of a file.
        new: Content of the later one.
        threshold: A median that grew by more than this part counts as slower, if the quartiles do
            not overlap either: noise is no regression.

    Returns:
        One line per case, and whether something of ours became slower, or a case failed or is
        missing.
    """
    before, after = medians(old), medians(new)
    lines = _missing(before, after, new)
    is_worse = bool(lines)
    for key in sorted(before.keys() & after.keys()):
        ratio = after[key].median / before[key].median
        verdict = ""
        if ratio > 1 + threshold and after[key].low > before[key].high:
            verdict = "SLOWER"
            is_worse = is_worse or _is_ours(key)
        elif ratio < 1 / (1 + threshold) and after[key].high < before[key].low:
            verdict = "faster"
        times = f"{1e3 * before[key].median:10.2f} -> {1e3 * after[key].median:10.2f} ms"
        lines.append(f"{' '.join(key):60s} {times}  x{ratio:.2f} {verdict}".rstrip())
    return lines, is_worse


def _is_ours(key: Key) -> bool:
    suite, _, case, system = key
    if suite in IN_TURN:  # two systems in one run, as its cases
        return case != "keras"
    return system.startswith("tfscale") or system == "in-step"


def _missing(before: dict[Key, Spread], after: dict[Key, Spread], new: dict[str, Any]) -> list[str]:
    """Return a line per system with failed runs in the new file, and per case that is not there."""
    failed = dict.fromkeys(
        (run["suite"], run["group"], run["system"]) for run in new["runs"] if "error" in run
    )
    gone = [key for key in sorted(before.keys() - after.keys()) if (*key[:2], key[3]) not in failed]
    return [f"{' '.join(name):60s} FAILED" for name in failed] + [
        f"{' '.join(key):60s} MISSING" for key in gone
    ]


def main() -> int:
    """Print the comparison; 1 if something of ours is slower, or a case failed or is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.1)
    options = parser.parse_args()
    old, new = (sessions.read(path) for path in (options.old, options.new))
    lines, is_worse = compare(old, new, options.threshold)
    print("\n".join(lines) or "The two files have no case in common.")
    for name in ("machine", "versions"):
        told = [_described(content, name) for content in (old, new)]
        if told[0] != told[1]:
            print(f"Note: {name} differs: {' / '.join(map(', '.join, told))}")
    return 1 if is_worse else 0


def _described(content: dict[str, Any], name: str) -> list[str]:
    """Return what the sessions of a file say, without duplicates."""
    found = (session[name] for session in content["sessions"].values() if name in session)
    return sorted({json.dumps(one) for one in found})


if __name__ == "__main__":
    sys.exit(main())
