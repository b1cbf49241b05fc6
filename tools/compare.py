"""Compare two files of benchmark results: `python tools/compare.py old.json new.json`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.numbers import Spread, spread

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
    """Compare what both files have.

    Args:
        old: Content of a file.
        new: Content of the later one.
        threshold: A median that grew by more than this part counts as slower, if the quartiles do
            not overlap either: noise is no regression.

    Returns:
        One line per case, and whether anything of ours became slower.
    """
    before, after = medians(old), medians(new)
    lines, has_slower = [], False
    for key in sorted(before.keys() & after.keys()):
        ratio = after[key].median / before[key].median
        verdict = ""
        if ratio > 1 + threshold and after[key].low > before[key].high:
            verdict = "SLOWER"
            has_slower = has_slower or key[3].startswith("tfscale")
        elif ratio < 1 / (1 + threshold) and after[key].high < before[key].low:
            verdict = "faster"
        times = f"{1e3 * before[key].median:10.2f} -> {1e3 * after[key].median:10.2f} ms"
        lines.append(f"{' '.join(key):60s} {times}  x{ratio:.2f} {verdict}".rstrip())
    return lines, has_slower


def main() -> int:
    """Print the comparison; 1 if something of ours became slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.1)
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
    lines, has_slower = compare(old, new, options.threshold)
    print("\n".join(lines) or "The two files have no case in common.")
    for name in ("machine", "versions"):
        if old[name] != new[name]:
            print(f"Note: {name} differs: {old[name]} / {new[name]}")
    return 1 if has_slower else 0


if __name__ == "__main__":
    sys.exit(main())
