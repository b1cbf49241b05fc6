"""Build the C++ tests and run them under mpiexec, plain and with sanitizers.

Each `custom_ops/test/*_test.cc` is one program, linked with `custom_ops/comm`; it returns 0 if all
its checks hold. `--times 4` runs `allreduce_times.cc` instead, with 4 ranks; `--beside FOLDER`
compares it with the same program of other objects, such as those of a wheel (tools/build_wheel.py).
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from build_native import ROOT, import_bare

native = import_bare("tfscale.native.compiler")
BUILT = ROOT / "build" / "native"  # of tools/build_native.py
TESTS = ROOT / "custom_ops" / "test"


@dataclass(frozen=True)
class Variant:
    """One way to compile and run the tests; without flags the engine is that of the library."""

    flags: tuple[str, ...]
    sizes: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)


# More ranks where messages pass other ranks, plain only: they share the cores.
MANY_RANKS = {"relay_test": (5, 16)}
TIMES = Variant((), ())
VARIANTS = {
    "plain": Variant((), (1, 2, 3, 4)),
    "address": Variant(
        ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        (2, 3),
        {
            "ASAN_OPTIONS": "detect_leaks=1",
            "LSAN_OPTIONS": f"suppressions={TESTS / 'lsan.supp'}:print_suppressions=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    ),
    "thread": Variant(
        ("-O1", "-g", "-fsanitize=thread"),
        (2, 3),
        {
            # MPI is not instrumented: what happens inside cannot be judged.
            "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
            # UCX rewrites mmap in place, under which the sanitizer's own mmap crashes.
            "UCX_MEM_MMAP_HOOK_MODE": "none",
        },
    ),
}


def build_tests(name: str, variant: Variant, only: str, suffix: str = "_test.cc") -> list[Path]:
    """Compile the programs of one variant that have `only` in their names; return them."""
    toolchain = native.find_toolchain()
    folder = ROOT / "build" / f"cpp-{name}"
    own = variant.flags or ("-O1",)
    flags = [*native.common_flags(ROOT / "custom_ops"), *own, *toolchain.compile_flags]
    engine, engine_folder = native.engine_sources(toolchain), BUILT
    if variant.flags:
        engine, engine_folder = [replace(source, flags=flags) for source in engine], folder
    tests = [
        native.Source(path, flags) for path in sorted(TESTS.glob(f"*{suffix}")) if only in path.stem
    ]
    objects = native.compile_objects(engine, engine_folder, toolchain.compiler)
    programs = []
    for test in native.compile_objects(tests, folder, toolchain.compiler):
        program = folder / test.stem
        command = [toolchain.compiler, *variant.flags, str(test), *map(str, objects)]
        command += ["-o", str(program), *toolchain.link_flags, "-pthread"]
        native.run_quietly(command, f"Linking {test.stem}")
        programs.append(program)
    return programs


def run_test(program: Path, size: int, variant: Variant, timeout_s: float) -> str:
    """Run one program with `size` ranks; return an empty string or what went wrong."""
    command = ["env", *(f"{k}={v}" for k, v in variant.environment.items())]
    mpiexec = native.find_tool("mpiexec")
    if mpiexec is None:
        return "no mpiexec is there"
    command += [mpiexec, "-n", str(size), str(program)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return f"no end after {timeout_s:.0f} s: {shlex.join(command)}\n{text[-6000:]}"
    if done.returncode != 0:
        return f"exit code {done.returncode}: {shlex.join(command)}\n{done.stdout[-6000:]}"
    return ""


def run_times(program: Path, options: argparse.Namespace) -> str:
    """Run the program of times on the ranks; return its table."""
    command = [str(native.find_tool("mpiexec")), "-n", str(options.times), str(program)]
    command += [str(options.ranks_per_host), str(options.seconds)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def read_times(table: str) -> dict[int, float]:
    """The engine's milliseconds by bytes, from a table of `allreduce_times.cc`."""
    rows = [line.split() for line in table.splitlines() if line.split()[0].isdigit()]
    return {int(row[0]): float(row[1]) for row in rows}


def compare_times(own: Path, other: Path, options: argparse.Namespace) -> None:
    """Print the ratios other / own of two programs, which run in turns, with 90 % intervals."""
    ratios: dict[int, list[float]] = {}
    for block in range(options.blocks):
        programs = (own, other) if block % 2 else (other, own)
        times = {program: read_times(run_times(program, options)) for program in programs}
        for n_bytes, own_ms in times[own].items():
            ratios.setdefault(n_bytes, []).append(times[other][n_bytes] / own_ms)
    print(f"{'bytes':>10} {'ratio':>7}   90 % interval of the median of {options.blocks} blocks")
    draw = random.Random(1)
    for n_bytes, of_size in ratios.items():
        medians = sorted(
            statistics.median(draw.choices(of_size, k=len(of_size))) for _ in range(2000)
        )
        low, high = medians[100], medians[-101]
        print(f"{n_bytes:10} {statistics.median(of_size):7.3f}   [{low:.3f}, {high:.3f}]")


def time_allreduces(options: argparse.Namespace) -> None:
    """Print times, messages and bytes of allreduces, or a comparison of two builds."""
    (program,) = build_tests("times", TIMES, "", "allreduce_times.cc")
    if options.beside is None:
        print(run_times(program, options))
        return
    objects = map(str, sorted(options.beside.rglob("*.o")))
    toolchain, other = native.find_toolchain(), program.with_name("allreduce_times_beside")
    command = [
        toolchain.compiler,
        str(program.parent / "test" / "allreduce_times.o"),
        *objects,
        "-o",
        str(other),
    ]
    native.run_quietly([*command, *toolchain.link_flags, "-pthread"], "Linking the other program")
    compare_times(program, other, options)


def main() -> int:
    """Run the variants asked for; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--only", default="", help="part of a test's name")
    parser.add_argument(
        "--sizes", default="", help="numbers of ranks; by default all that there are"
    )
    parser.add_argument("--timeout-s", type=float, default=900.0, help="per program and size")
    parser.add_argument("--times", type=int, metavar="RANKS", help="time allreduces instead")
    parser.add_argument("--ranks-per-host", type=int, default=0, help="of --times; 0: as they are")
    parser.add_argument("--seconds", type=float, default=0.5, help="of --times, for each size")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="of --times: other objects")
    parser.add_argument("--blocks", type=int, default=20, help="of --beside: runs of each program")
    options = parser.parse_args()
    if options.times:
        time_allreduces(options)
        return 0
    failures = 0
    for name in options.variants.split(","):
        variant, start = VARIANTS[name], time.monotonic()
        programs = build_tests(name, variant, options.only)
        if not programs:
            parser.error(f"No test has this in its name. Received: --only {options.only}.")
        print(f"C++ tests, {name}: built in {time.monotonic() - start:.1f} s")
        for program in programs:
            more = MANY_RANKS.get(program.name, ()) if name == "plain" else ()
            sizes = options.sizes.split(",") if options.sizes else (*variant.sizes, *more)
            for size in map(int, sizes):
                start = time.monotonic()
                problem = run_test(program, size, variant, options.timeout_s)
                failures += bool(problem)
                word = "FAILED" if problem else "ok"
                seconds = time.monotonic() - start
                print(f"  {word:6} {program.name} {name} {size} ranks {seconds:.1f} s", flush=True)
                if problem:
                    print(problem)
    print(f"C++ tests: {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
