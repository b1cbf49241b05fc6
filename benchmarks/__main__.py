"""Measure: `python -m benchmarks collectives step --quick --output results.json`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import MEMORY, Cell, measure
from benchmarks.provenance import ROOT
from tfscale.cluster.running import leave_on_sigterm

_SIZES = tuple(1024 * 4**i for i in range(10))  # 1 KB to 256 MB
_QUICK_SIZES = (64 << 10, 1 << 20, 16 << 20)
_QUICK_MODELS = ("vgg_like", "resnet20")
_MODELS = ("vgg_like", "vgg_a", "resnet50", "resnet20", "edsr16")
_EXCHANGES = ("allreduce",)


def has_horovod() -> bool:
    """Return whether Horovod is installed."""
    return importlib.util.find_spec("horovod") is not None


def collective_cells(is_quick: bool, places: Sequence[str]) -> list[Cell]:
    """Return the cells of the collectives."""
    systems = ["mpi4py", "tfscale", *(["horovod"] if has_horovod() else [])]
    sizes = _QUICK_SIZES if is_quick else _SIZES
    arguments = ("--bytes", *map(str, sizes), "--repeats", "5" if is_quick else "10")
    return [
        Cell("collectives", f"{place} {n_ranks} ranks", system, place, n_ranks, arguments)
        for place in places or (MEMORY, "1gbit")
        for n_ranks in (([2] if place == MEMORY else [4]) if is_quick else [2, 4])
        for system in systems
    ]


def step_cells(
    is_quick: bool, places: Sequence[str], models: Sequence[str], exchanges: Sequence[str]
) -> list[Cell]:
    """Return the cells of the training steps; computing alone needs no links."""
    systems = [*(f"tfscale-{e}" for e in exchanges), *(["horovod"] if has_horovod() else [])]
    repeats = ("--repeats", "3" if is_quick else "10", "--warmup", "1" if is_quick else "2")
    cells = []
    for model in models or (_QUICK_MODELS if is_quick else _MODELS):
        for place in places or (("1gbit",) if is_quick else (MEMORY, "1gbit", "250mbit")):
            arguments = ("--model", model, *repeats)
            group, n_ranks = f"{model} {place}", 2 if place == MEMORY else 4
            cells.append(Cell("step", group, "compute", MEMORY, n_ranks, arguments))
            cells += [Cell("step", group, s, place, n_ranks, arguments) for s in systems]
    return cells


def tell(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


def main() -> int:
    """Run the suites asked for; 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="+", choices=("collectives", "step"))
    parser.add_argument("--quick", action="store_true", help="fewer sizes, models and rounds")
    parser.add_argument("--models", nargs="+", choices=_MODELS)
    parser.add_argument("--exchanges", nargs="+", default=_EXCHANGES)
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--places", nargs="+", help="only these: memory, 1gbit, 250mbit")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one run")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench" / "results.json")
    options = parser.parse_args()
    leave_on_sigterm()
    quick, places = options.quick, options.places or ()
    cells = collective_cells(quick, places) if "collectives" in options.suites else []
    if "step" in options.suites:
        cells += step_cells(quick, places, options.models or (), options.exchanges)
    rounds = options.rounds or (1 if options.quick else 3)
    content = measure(cells, rounds, options.output, options.timeout, tell=tell)
    return 1 if any("error" in run for run in content["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
