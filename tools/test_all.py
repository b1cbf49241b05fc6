"""Run all tests, or one part of them: C++ with sanitizers, then pytest on the installed wheel.

    python tools/test_all.py [--part 2/3] [--list] [--only REGEX] [--python P] [--minutes M]
        [--first N] [-- PYTEST_ARGUMENTS]

`make test-all` builds what this needs. Units are dealt out to parts by their usual minutes on two
cores, the longest first. All units of a part run, whatever fails; a table at the end says how long
each took. With `--minutes`, a unit that might not end in time is left out and named: how long it
takes is guessed from its usual minutes and from how fast the machine was in the units before.
`--first N` begins the list with its unit N (counted on, past the end): with another N every time,
no unit is always the one that is left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL_PYTHON = ROOT / "build" / "wheel-venv" / "bin" / "python"
# What tests read; sources of the library are not among them, so that the wheel is what is tested.
COPIED = (
    *("tests", "recipes", "tools", "docs"),
    *("README.md", "Makefile", "mkdocs.yml", "pyproject.toml"),
)
# They read the sources, and are part of `make check`.
OF_SOURCES = (
    *("test_structure", "test_house", "test_error_texts", "test_packaging", "test_prose"),
    "test_simulated_engine",
    "test_simulated_steps",
)
# Of a unit that failed, printed again at the end, as hours of other output may be in between.
LAST_LINES = 40
# A unit may take longer than expected by this factor.
SLACK = 1.25
JOBS = "tests/parallel/test"
PARALLEL = f"{JOBS}_parallel.py"
SLURM = "tests/faults/test_slurm.py"


@dataclass(frozen=True)
class Unit:
    """Tests that run in one process.

    Attributes:
        name: For the table, and for `--only`.
        minutes: What it usually takes on two cores.
        words: Arguments of pytest, or of the tool.
        tool: What runs instead of pytest: a file in `tools/`, or "make"; "" for pytest.
        is_of_sources: It reads the sources, and runs in their folder.
    """

    name: str
    minutes: float
    words: tuple[str, ...]
    tool: str = ""
    is_of_sources: bool = False


UNITS = (
    Unit("C++", 1.5, ("--variants", "plain"), tool="cpp_tests.py"),
    Unit("C++, address sanitizer", 2.5, ("--variants", "address"), tool="cpp_tests.py"),
    Unit("C++, thread sanitizer", 3.5, ("--variants", "thread"), tool="cpp_tests.py"),
    Unit("engine, simulated", 6.0, ("--seconds", "300", "--jobs", "2"), tool="simulate_engine.py"),
    Unit(
        "simulator",
        1.0,
        ("tests/unit/test_simulated_engine.py", "tests/unit/test_simulated_steps.py"),
        is_of_sources=True,
    ),
    Unit(
        "unit",
        9.0,
        (
            "tests/unit",
            *("-n", "2", "--dist", "loadfile"),
            *(f"--ignore=tests/unit/{name}.py" for name in OF_SOURCES),
        ),
    ),
    Unit("first use", 2.0, ("tests/unit/test_packaging.py", "-m", "slow"), is_of_sources=True),
    Unit("1 rank", 2.5, (PARALLEL, "-k", "test_case and 1-")),
    Unit("2 ranks", 20.0, (PARALLEL, "-k", "test_case and 2-")),
    Unit("3 ranks", 14.0, (PARALLEL, "-k", "test_case and 3-")),
    Unit("4 ranks", 14.0, (PARALLEL, "-k", "test_case and 4- or test_no_case")),
    Unit("users' scripts", 20.0, ("tests/scripts",)),
    Unit("compression", 10.0, (f"{JOBS}_compression.py",)),
    Unit("recipes", 8.0, (f"{JOBS}_recipes_smoke.py",)),
    Unit("resumed jobs", 10.0, (f"{JOBS}_resume.py", f"{JOBS}_tables.py")),
    Unit(
        "jobs",
        10.0,
        tuple(
            f"{JOBS}_{n}.py" for n in ("environments", "from_python", "hosts", "monitor", "spawn")
        ),
    ),
    Unit("layouts of hosts", 10.0, (f"{JOBS}_layouts.py",)),
    Unit("faults", 25.0, ("tests/faults", f"--ignore={SLURM}")),
    Unit("Slurm", 2.5, (SLURM,)),
    Unit("emulated cluster", 7.0, ("tests/cluster",)),
    Unit("Horovod's contract", 14.0, ("tests/horovod_contract",)),
    Unit("lowest versions", 14.0, ("lowest",), tool="test_versions.py"),
    Unit("Ray", 8.0, ("test-ray",), tool="make"),
)


def deal_out(units: Sequence[Unit], n_parts: int) -> list[list[Unit]]:
    """Return the units of each part, in their order: every unit in exactly one."""
    parts: list[list[Unit]] = [[] for _ in range(n_parts)]
    for unit in sorted(units, key=lambda u: -u.minutes):
        min(parts, key=lambda part: sum(u.minutes for u in part)).append(unit)
    return [sorted(part, key=units.index) for part in parts]


def parse_part(text: str) -> tuple[int, int]:
    """Return k and n of "k/n"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    k, n = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= k <= n:
        raise argparse.ArgumentTypeError(f"k/n with k from 1 to n, as 2/3. Received: {text}")
    return k, n


def run(unit: Unit, folder: Path, python: Path, more: Sequence[str]) -> tuple[int, list[str]]:
    """Run a unit, in a folder without the library's sources if it can.

    Returns its exit status and the last lines of what it printed.
    """
    if unit.tool:
        is_file = unit.tool.endswith(".py")
        program = [sys.executable, str(ROOT / "tools" / unit.tool)] if is_file else [unit.tool]
        command = [*program, *unit.words]
    else:
        interpreter = sys.executable if unit.is_of_sources else str(python.absolute())
        command = [interpreter, "-m", "pytest", *unit.words, *more]
    has_sources = bool(unit.tool) or unit.is_of_sources
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command,
        cwd=ROOT if has_sources else folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last.append(line)
    return process.returncode, list(last)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the units of a part; return 1 if one failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description="Run all tests, or one part of them.")
    parser.add_argument("--part", type=parse_part, default=(1, 1), metavar="K/N")
    parser.add_argument("--only", default="", metavar="REGEX", help="units whose name matches")
    parser.add_argument(
        "--python", type=Path, default=WHEEL_PYTHON, help="where tfscale is installed"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time for all units")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with unit N")
    parser.add_argument("--list", action="store_true", help="say what would run")
    arguments = parser.parse_args(words[:cut])
    part, n_parts = arguments.part
    units = [u for u in deal_out(UNITS, n_parts)[part - 1] if re.search(arguments.only, u.name)]
    first = arguments.first % len(units) if units else 0
    units = units[first:] + units[:first]
    rows = []
    left_out = []
    failed: list[str] = []  # the last lines of units that failed
    elapsed = usual = 0.0
    with tempfile.TemporaryDirectory(prefix="tfscale-tests-") as name:
        folder = Path(name)
        for source in COPIED if not arguments.list else ():
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, folder / source)  # type: ignore[operator]
        for unit in units:
            pace = max(1.0, elapsed / usual if usual else 1.0)  # slower than usual by this factor
            if elapsed + unit.minutes * pace * SLACK > arguments.minutes:
                left_out.append(unit.name)
                continue
            print(f"== {unit.name}, about {unit.minutes:g} min", flush=True)
            if arguments.list:
                elapsed += unit.minutes
                usual += unit.minutes
                continue
            start = time.monotonic()
            status, last = run(unit, folder, arguments.python, words[cut + 1 :])
            failed += [f"== the end of {unit.name}\n", *last] if status else []
            minutes = (time.monotonic() - start) / 60
            rows.append((unit.name, minutes, status))
            elapsed += minutes
            usual += unit.minutes
    print(*failed, sep="", end="")
    for name, minutes, status in rows:
        print(f"{minutes:6.1f} min  {'passed' if status == 0 else f'FAILED ({status})'}  {name}")
    print(f"{elapsed:6.1f} min  part {part} of {n_parts}")
    if left_out:
        print(f"Left out, as {arguments.minutes:g} minutes are too few: {', '.join(left_out)}.")
    return int(any(status for _, _, status in rows))


if __name__ == "__main__":
    sys.exit(main())
