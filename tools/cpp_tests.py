"""Build the C++ tests and run them under mpiexec, plain and with sanitizers.

Each `custom_ops/test/*_test.cc` is one program, linked with `custom_ops/comm`; it returns 0 if all
its checks hold. `--times 4` runs `allreduce_times.cc` instead, with 4 ranks.
"""

from __future__ import annotations

import argparse
import shlex
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


def build_tests(name: str, variant: Variant, pattern: str = "*_test.cc") -> list[Path]:
    """Compile the programs of one variant; return them."""
    toolchain = native.find_toolchain()
    folder = ROOT / "build" / f"cpp-{name}"
    own = variant.flags or ("-O1",)
    flags = [*native.common_flags(ROOT / "custom_ops"), *own, *toolchain.compile_flags]
    engine, engine_folder = native.engine_sources(toolchain), BUILT
    if variant.flags:
        engine, engine_folder = [replace(source, flags=flags) for source in engine], folder
    tests = [native.Source(path, flags) for path in sorted(TESTS.glob(pattern))]
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


def run_times(size: int, ranks_per_host: int, seconds: float) -> int:
    """Print times, messages and bytes of allreduces; return the exit code."""
    (program,) = build_tests("times", TIMES, "allreduce_times.cc")
    mpiexec = str(native.find_tool("mpiexec"))
    command = [mpiexec, "-n", str(size), str(program), str(ranks_per_host), str(seconds)]
    return subprocess.call(command)


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
    options = parser.parse_args()
    if options.times:
        return run_times(options.times, options.ranks_per_host, options.seconds)
    failures = 0
    for name in options.variants.split(","):
        variant, start = VARIANTS[name], time.monotonic()
        programs = [p for p in build_tests(name, variant) if options.only in p.name]
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
