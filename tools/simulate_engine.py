"""Simulate trainings of the C++ engine: thousands of schedules, each replayed by a number.

    python tools/simulate_engine.py --seed 7 --ranks 16 --log    # one run, with all that happens
    python tools/simulate_engine.py --seconds 20                 # seeds of this commit, printed
    python tools/simulate_engine.py --seed 0 --count 300000      # seeds one after another

The sources of `custom_ops/comm` are linked with a simulated MPI, clock and system
(`custom_ops/test/sim`): all ranks are fibers of one thread, and everything is drawn from the seed.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from build_native import ROOT, import_bare

native = import_bare("tfscale.native.compiler")
FOLDER = ROOT / "build" / "sim"
# Each simulated process has its own: see the end of custom_ops/test/sim/training.cc.
WRAPPED = (
    "_ZN7tfscale6Engine3GetEv",
    "_ZN7tfscale16PendingVariables3GetEv",
    "_ZN7tfscale10BufferPool3GetEm",
    "_ZN7tfscale10BufferPool6ReturnEPcm",
)
# Nor do timed steps touch the memory of vectors: see custom_ops/test/sim/steps.cc.
WRAPPED_OF_STEPS = (
    *WRAPPED,
    "_ZN7tfscale6ReduceERKSt6vectorIPKvSaIS2_EEPvmNS_5DTypeENS_8ReduceOpEd",
    "memcpy",
    "memset",
)
_OF_STEPS = ("steps",)  # sources of the one program, and of the other
_OF_TRAININGS = ("invariants", "program", "scenario", "simulate", "training", "work")
# Failed engines keep their memory until their process ends.
BATCH = 250
# A run takes milliseconds. One that polls for ever in virtual time ends after seconds.
LIMIT_S = 600.0


def _flags(sources: Path) -> list[str]:
    # The simulated mpi.h, and no checks of the C library that know no fibers.
    flags = [*native.common_flags(sources), f"-I{sources / 'test' / 'sim'}"]
    return [*flags, "-O2", "-DNDEBUG", "-U_FORTIFY_SOURCE"]


def build(replaced: Path | None = None, times_steps: bool = False) -> Path:
    """Compile the engine and the simulator; return the program: `steps` with `times_steps`.

    `replaced` is compiled instead of the source of the same name; the program is beside it.
    """
    sources, compiler = ROOT / "custom_ops", native.find_compiler()
    others = _OF_TRAININGS if times_steps else _OF_STEPS
    paths = sorted((sources / "comm").glob("*.cc"))
    paths += sorted(p for p in (sources / "test/sim").glob("*.cc") if p.stem not in others)
    flags = _flags(sources)
    objects = native.compile_objects([native.Source(p, flags) for p in paths], FOLDER, compiler)
    program: Path = FOLDER / ("steps" if times_steps else "simulate")
    if replaced is not None:
        program = replaced.with_suffix("")
        target = replaced.with_suffix(".o")
        command = [compiler, *flags, "-c", str(replaced), "-o", str(target)]
        native.run_quietly(command, f"Compiling {replaced.name}")
        objects = [target if path.name == target.name else path for path in objects]
    wraps = [f"-Wl,--wrap={n}" for n in (WRAPPED_OF_STEPS if times_steps else WRAPPED)]
    command = [compiler, *map(str, objects), *wraps, "-pthread", "-o", str(program)]
    native.run_quietly(command, "Linking the simulator")
    return program


@dataclass
class Tally:
    """The number of runs, and the seeds that violate an invariant."""

    n_runs: int = 0
    n_collectives: int = 0
    problems: list[str] = field(default_factory=list)


def run_batch(program: Path, seed: int, count: int, words: Sequence[str]) -> Tally:
    """Run `count` seeds in one process; a crash or a hang is a problem of its last seed."""
    command = [str(program), "--seed", str(seed), "--count", str(count), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        last = (error.stderr or b"?").decode().splitlines()[-1]
        return Tally(count, 0, [f"VIOLATION seed {last}: no end after {LIMIT_S:.0f} s"])
    lines = done.stdout.splitlines()
    tally = Tally(count, 0, [line for line in lines if line.startswith("VIOLATION")])
    ends = [line.split() for line in lines if line.startswith("runs ")]
    if ends:
        tally.n_runs, tally.n_collectives = int(ends[0][1].strip(",")), int(ends[0][5].strip(","))
    else:
        last = done.stderr.splitlines()[-1]
        tally.problems.append(
            f"VIOLATION seed {last}: the engine ended by signal {-done.returncode}"
        )
    return tally


def seed_of_commit() -> int:
    """Return the first of this commit's seeds: fresh with each commit, and the same anywhere."""
    try:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    except (OSError, subprocess.CalledProcessError):  # not a clone
        return random.SystemRandom().randrange(10**12)
    return int(commit[:10], 16)


def run_many(program: Path, options: argparse.Namespace, words: Sequence[str]) -> Tally:
    """Run seeds until `--count` or `--seconds` is reached; print what they find."""
    first = options.seed
    if first is None:
        first = seed_of_commit()
        print(f"simulating seeds from {first}", flush=True)
    total, next_seed = Tally(), first
    start = time.monotonic()
    end = start + (options.seconds or float("inf"))
    last_seed = first + (options.count or 10**12)
    with ThreadPoolExecutor(options.jobs) as pool:
        while time.monotonic() < end and next_seed < last_seed:
            batches = []
            for _ in range(options.jobs):
                count = min(BATCH, last_seed - next_seed)
                left = max(1, int(end - time.monotonic())) if options.seconds else 10**6
                limit = ["--seconds", str(left)]
                batches.append(pool.submit(run_batch, program, next_seed, count, [*words, *limit]))
                next_seed += count
            for batch in batches:
                tally = batch.result()
                total.n_runs += tally.n_runs
                total.n_collectives += tally.n_collectives
                total.problems += tally.problems
                for problem in tally.problems:
                    print(problem, flush=True)
            if options.stops and total.problems:
                break
    seconds = time.monotonic() - start
    print(
        f"{total.n_runs} schedules, {total.n_collectives} collectives, in {seconds:.1f} s "
        f"({total.n_runs / seconds / options.jobs:.0f} per second and process): "
        f"{len(total.problems)} violations"
    )
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Build the simulator and run it; return 1 if an invariant does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seed", type=int, help="the only seed, or the first; default: of the commit"
    )
    parser.add_argument("--count", type=int, help="seeds one after another")
    parser.add_argument("--seconds", type=float, help="of seeds one after another")
    parser.add_argument("--ranks", type=int, default=0, help="default: drawn, from 1 to 16")
    parser.add_argument("--plans", type=int, default=0, help="default: drawn, from 1 to 5")
    parser.add_argument("--steps", type=int, default=0, help="default: drawn")
    parser.add_argument("--no-marks", action="store_true", help="no rank stops, fails or leaves")
    parser.add_argument("--no-faults", action="store_true", help="no deaths or other faults")
    parser.add_argument("--log", action="store_true", help="print all that happens in one run")
    parser.add_argument("--stops", action="store_true", help="after the first violation")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args(argv)
    drawn = ["--ranks", options.ranks, "--plans", options.plans, "--steps", options.steps]
    chosen = ["--marks", int(not options.no_marks), "--faults", int(not options.no_faults)]
    words = [str(word) for word in (*drawn, *chosen)]
    program = build()
    if options.seed is not None and options.count is None and options.seconds is None:
        command = [str(program), "--seed", str(options.seed), *words]
        return subprocess.run([*command, "--log", str(int(options.log))]).returncode
    total = run_many(program, options, words)
    if total.problems:
        seed = total.problems[0].split()[2].strip(":")
        again = ["python", "tools/simulate_engine.py", "--seed", seed]
        for name in ("ranks", "plans", "steps"):
            if getattr(options, name):
                again += [f"--{name}", str(getattr(options, name))]
        again += [f"--no-{n}" for n in ("marks", "faults") if getattr(options, f"no_{n}")]
        print(f"Replay: {shlex.join([*again, '--log'])}")
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
