"""The page of places where layers sleep.

`python -m benchmarks.sleeping_page docs/sleeping.json --output docs` writes results/sleeping.md,
and two pictures: steps of four ranks, and the speedup over one process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import scaling, sessions
from benchmarks.report import about, made_by
from benchmarks.rows import collect
from benchmarks.sleeping_tables import tables

_MARK = "<!-- Below: made by `python -m benchmarks.sleeping_page`. -->\n"


def _is_apart(system: str) -> bool:
    """Not in the picture: it needs a scale of its own, or its ranks differ between averages."""
    return system == "ddp-fsdp" or system.startswith("tfscale-local")


def page(content: sessions.Content) -> str:
    """The tables of all models and places, and those of speedups."""
    series = scaling.series_of(content["runs"])
    parts = [about(content), "## Steps\n", *tables(content["runs"])]
    if series:
        parts += ["## Speedup over one process\n", *map(scaling.series_table, series)]
    return "\n".join(parts)


def main() -> None:
    """Write the page and its pictures; what stands above the mark in it is kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sleeping_page", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    options = parser.parse_args()
    content = sessions.read(options.results)
    path = options.output / "results" / "sleeping.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    above = path.read_text().partition(_MARK)[0] if path.exists() else "# Where layers sleep\n\n"
    path.write_text(f"{above}{_MARK}\n{page(content)}")
    from benchmarks.pictures import draw_steps

    made = made_by(content, "step", slept=True)
    largest = [
        run
        for run in content["runs"]
        if run["group"].endswith(" sleep-4x1@1gbit") and not _is_apart(run["system"])
    ]
    steps = options.output / "benchmarks-sleeping.png"
    draw_steps(collect(largest, "step"), steps, f"{made}; bars: quartiles")
    series = scaling.series_of(content["runs"])
    if series:
        scaling.draw(series, options.output / "benchmarks-scaling.png", made)


if __name__ == "__main__":
    main()
