"""Allreduces by size and place: the engine beside MPI, and tfscale beside Horovod, in blocks.

    python -m benchmarks.collective_times --output docs/collectives.json
    python -m benchmarks.collective_times --output docs/collectives.json --page docs

A block measures all sizes. In C++ (`custom_ops/test/allreduce_times.cc`) the engine and MPI's own
allreduce take turns in one job; from a traced function of TensorFlow, Horovod has a job of its own
after tfscale's, or before it. So has Open MPI with HAN, called from Python, where hosts have
several ranks (`make open-mpi`). An interrupted run continues where it was; another commit, machine
or version begins again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import provenance, sessions
from benchmarks.cells import has_horovod
from benchmarks.harness import Cell, run_cell
from benchmarks.launch import cluster_for, has_open_mpi, run_ranks
from benchmarks.markdown import table, three_digits
from benchmarks.numbers import Ratio, paired_ratio
from benchmarks.places import parse_place
from benchmarks.report import about, made_by
from tools.cluster.running import leave_on_sigterm

PLACES = ("1x2@memory", "1x4@memory", "4x1@1gbit", "2x2@1gbit", "2x4@1gbit")
SIZES = tuple(1024 * n for n in (1, 4, 16, 64, 256, 1024, 4096, 16384, 32768, 65536))
# Ours, and what it is compared with.
PAIRS = (("engine", "mpi"), ("engine", "open-mpi"), ("tfscale", "horovod"))
_MARK = "<!-- Below: made by `python -m benchmarks.collective_times`. -->\n"
_TIMEOUT_S = 600.0


def time_program(program: Path, place: str) -> dict[str, dict[str, list[float]]]:
    """Run the C++ program once; return seconds by system and by bytes, as lists of one."""
    n_ranks = parse_place(place).n_ranks
    with tempfile.TemporaryDirectory(prefix="tfscale-bench-") as folder:
        log = Path(folder) / "log"
        run_ranks(place, n_ranks, [str(program)], {"BENCH_LOG": str(log)}, _TIMEOUT_S)
        rows = [line.split() for line in log.read_text().splitlines()]
    times = [row for row in rows if row and row[0].isdigit()]
    return {
        system: {row[0]: [float(row[column]) / 1e3] for row in times}
        for column, system in ((1, "engine"), (2, "mpi"))
    }


def time_system(system: str, place: str) -> dict[str, list[float]]:
    """Run a system once, from Python; return seconds by bytes."""
    arguments = ("--bytes", *map(str, SIZES), "--repeats", "5")
    n_ranks = parse_place(place).n_ranks
    run = run_cell(Cell("collectives", place, system, place, n_ranks, arguments), _TIMEOUT_S)
    if "error" in run:
        raise RuntimeError(f"{system} at {place}: {run['error']}")
    samples: dict[str, list[float]] = run["samples"]
    return samples


def measure(path: Path, n_blocks: int, places: tuple[str, ...]) -> None:
    """Add what is missing of the blocks of each place to the file, which is of one session."""
    sys.path.insert(0, str(provenance.ROOT / "tools"))
    import cpp_tests

    (program,) = cpp_tests.build_tests("times", cpp_tests.TIMES, "", "allreduce_times.cc")
    content = sessions.read(path) if path.exists() else {"sessions": {}, "runs": []}
    session = sessions.enter(content, {**provenance.describe(), "cells": "collective times"})
    runs: list[dict[str, Any]] = [r for r in content["runs"] if r["session"] == session]
    content = {"sessions": {session: content["sessions"][session]}, "runs": runs}

    def has(place: str, system: str, block: int) -> bool:
        return any((r["group"], r["system"], r["round"]) == (place, system, block) for r in runs)

    def keep(place: str, system: str, block: int, samples: Mapping[str, list[float]]) -> None:
        head = {"suite": "collectives", "group": place, "system": system, "place": place}
        facts = {"round": block, "session": session, "commit": provenance.commit()}
        facts["load"] = [provenance.load()]
        medians = {size: [statistics.median(seconds)] for size, seconds in samples.items()}
        runs.append({**head, **facts, "samples": medians})
        sessions.write(path, content)
        print(place, system, f"block {block + 1} of {n_blocks}", flush=True)

    with cluster_for([(place, parse_place(place).n_ranks) for place in places]):
        for block in range(n_blocks):
            for place in places:
                if not has(place, "mpi", block):
                    for system, samples in time_program(program, place).items():
                        keep(place, system, block, samples)
                where = parse_place(place)
                has_han = has_open_mpi() and 1 < where.n_hosts < where.n_ranks
                systems = (*["open-mpi"] * has_han, "tfscale", *["horovod"] * has_horovod())
                for system in systems[:: -1 if block % 2 else 1]:
                    if not has(place, system, block):
                        keep(place, system, block, time_system(system, place))


@dataclass(frozen=True)
class Comparison:
    """An allreduce of one size at one place, of ours and of another system.

    Attributes:
        ours_s, other_s: Seconds, the medians of all blocks.
        ratio: How many times as long the other one takes.
    """

    ours_s: float
    other_s: float
    ratio: Ratio

    @property
    def is_slower(self) -> bool:
        """Ours takes longer, and the interval does not hold 1."""
        return self.ratio.high < 1


def compare(
    runs: list[dict[str, Any]], place: str, n_bytes: int, ours: str, other: str
) -> Comparison | None:
    """Compare the blocks of two systems; None where there are none of both."""
    by_system: dict[str, dict[int, list[float]]] = {ours: {}, other: {}}
    for run in runs:
        if run["group"] == place and run["system"] in by_system:
            by_system[run["system"]][run["round"]] = run["samples"][str(n_bytes)]
    ratio = paired_ratio(by_system[other], by_system[ours])
    if ratio is None:
        return None

    def median(system: str) -> float:
        return statistics.median(statistics.median(block) for block in by_system[system].values())

    return Comparison(median(ours), median(other), ratio)


Comparisons = dict[tuple[str, int, tuple[str, str]], Comparison]


def comparisons(runs: list[dict[str, Any]]) -> Comparisons:
    """Return those of all places, sizes and pairs that were measured."""
    found = {}
    for place in PLACES:
        for n_bytes in SIZES:
            for pair in PAIRS:
                one = compare(runs, place, n_bytes, *pair)
                if one is not None:
                    found[place, n_bytes, pair] = one
    return found


def page(content: sessions.Content, found: Comparisons) -> str:
    """Return a table per place, and how many cells are lost."""
    parts, n_cells, n_lost = [about(content)], 0, 0
    for place in PLACES:
        pairs = [pair for pair in PAIRS if (place, SIZES[0], pair) in found]
        if not pairs:
            continue
        head = ["bytes"]
        for ours, other in pairs:
            head += [f"{ours} ms", f"{other} ms", f"{other} / {ours}"]
        lines = []
        for n_bytes in SIZES:
            here = {pair: found[place, n_bytes, pair] for pair in pairs}
            slower = [other for (_, other), one in here.items() if one.is_slower]
            n_cells += 1
            n_lost += bool(slower)
            line = [word for one in here.values() for word in _columns(one)]
            lines.append([f"{n_bytes:,}", *line, ", ".join(slower)])
        parts += [f"## {place}\n", table([*head, "slower than"], lines)]
    parts.insert(1, f"Not slower in {n_cells - n_lost} of {n_cells} cells.\n")
    return "\n".join(parts)


def draw(content: sessions.Content, found: Comparisons, path: Path) -> None:
    """Draw the ratios of all pairs by size, a panel per place."""
    from benchmarks.pictures import draw_collectives

    ratios: dict[str, dict[str, list[tuple[int, Ratio]]]] = {}
    for (place, n_bytes, (ours, other)), one in found.items():
        lines = ratios.setdefault(place, {})
        lines.setdefault(f"{other} / {ours}", []).append((n_bytes, one.ratio))
    draw_collectives(ratios, path, made_by(content, "collectives"))


def _columns(one: Comparison) -> list[str]:
    ratio = one.ratio
    return [
        three_digits(one.ours_s),
        three_digits(one.other_s),
        f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})",
    ]


def main() -> None:
    """Measure, or write the page; what stands above the mark in it is kept."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collective_times", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--places", nargs="+", default=PLACES, metavar="PLACE")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="do not measure")
    options = parser.parse_args()
    if options.page is None:
        leave_on_sigterm()
        measure(options.output, options.blocks, tuple(options.places))
        return
    content = sessions.read(options.output)
    found = comparisons(content["runs"])
    draw(content, found, options.page / "collectives.png")
    path = options.page / "results" / "collectives.md"
    above = path.read_text().partition(_MARK)[0] if path.exists() else "# Allreduces\n\n"
    path.write_text(f"{above}{_MARK}\n{page(content, found)}")


if __name__ == "__main__":
    main()
