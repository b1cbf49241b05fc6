"""Measure: `python -m benchmarks step --quick --output results.json`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.cells import (
    EXCHANGES,
    FULL,
    MODELS,
    QUICK,
    SLEEPING_MODELS,
    SUITES,
    TABLE,
    TRAINED_MODELS,
    Choice,
    cells_of,
    is_asleep,
    lacks_torch,
)
from benchmarks.harness import measure
from benchmarks.provenance import ROOT
from tools.cluster.running import leave_on_sigterm


def tell(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    # Whole names only: `--output` is left out of what the results record.
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("suites", nargs="+", choices=SUITES)
    known_models = tuple(dict.fromkeys((*MODELS, *TRAINED_MODELS, *SLEEPING_MODELS)))
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="fewer sizes, models and rounds")
    extent.add_argument("--full", action="store_true", help="every cell, however long it takes")
    parser.add_argument("--models", nargs="+", choices=known_models, default=())
    ours = f"tfscale's, or cases of overlap; default: {' '.join(EXCHANGES)}"
    parser.add_argument("--exchanges", nargs="+", default=(), help=ours)
    known = "compute, horovod, mwms, ddp, tfscale-auto, ..."
    parser.add_argument("--systems", nargs="+", default=(), help=f"only these: {known}")
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--places", nargs="+", default=(), help="memory, 1gbit, 2x4@1gbit, ...")
    turns = "of `step`, but not in `fit`: jobs live side by side and take --rounds turns"
    parser.add_argument("--side-by-side", action="store_true", help=turns)
    factor = "where layers sleep: of times, to begin with (default: 1)"
    parser.add_argument("--slow-motion", type=int, default=1, help=factor)
    limit = "seconds of one run; side by side, times the number of jobs"
    parser.add_argument("--timeout", type=float, default=600.0, help=limit)
    default = "JSON; default: build/bench/ with quick.json, table.json or full.json"
    parser.add_argument("--output", type=Path, help=default)
    return parser


def main() -> int:
    """Run the suites asked for; 1 if a run failed."""
    parser = _parser()
    options = parser.parse_args()
    leave_on_sigterm()
    extent = QUICK if options.quick else FULL if options.full else TABLE
    choice = Choice(extent, options.places, options.models, options.exchanges, options.systems)
    try:
        cells = cells_of(options.suites, choice)
    except ValueError as error:
        parser.error(str(error))
    if lacks_torch(options.suites, choice):
        tell("PyTorch's systems are left out: it is not installed. `make ddp` does that.")
        if not cells:
            return 1
    if options.side_by_side:
        cells = [cell for cell in cells if not cell.system.endswith("-fit")]
        if not cells or {cell.suite for cell in cells} != {"step"}:
            parser.error(
                "Side by side only the systems of `step` are measured that do not train in `fit`. "
                f"Received: {' '.join(options.suites)}. Leave --side-by-side out for others."
            )
    if any(is_asleep(cell.place) for cell in cells):
        # In a process of its own: this one keeps no TensorFlow in memory.
        build = "from benchmarks import sleeping; sleeping.build_operation()"
        subprocess.run([sys.executable, "-c", build], check=True, cwd=ROOT)
    path = options.output or ROOT / "build" / "bench" / f"{extent}.json"
    rounds = options.rounds or (1 if options.quick else 3)
    content = measure(
        cells, rounds, path, options.timeout, tell, options.side_by_side, options.slow_motion
    )
    return 1 if any("error" in run for run in content["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
