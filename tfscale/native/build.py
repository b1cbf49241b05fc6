"""Compile `custom_ops` into `libtfscale.so`, objects in parallel and only those that changed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tfscale.native.toolchain import BuildError, find_tensorflow, find_toolchain, run_quietly

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY_NAME = "libtfscale.so"
STAMP_NAME = "build.json"
_OPTIMISED = ("-O3", "-DNDEBUG")


def find_sources() -> Path:
    """Return the folder `custom_ops`: of the checkout, or the copy that the package carries.

    Raises:
        BuildError: Neither is there.
    """
    for folder in (PACKAGE.parent / "custom_ops", PACKAGE / "_lib" / "custom_ops"):
        if (folder / "comm").is_dir():
            return folder
    raise BuildError(
        f"Building needs the C++ sources. Received: none beside {PACKAGE}. Reinstall tfscale."
    )


def _is_current(target: Path, key: str) -> bool:
    record, deps = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and deps.exists() and record.exists()):
        return False
    if record.read_text() != key:
        return False
    words = deps.read_text().replace("\\\n", " ").split()[1:]
    built = target.stat().st_mtime
    return all(Path(w).exists() and Path(w).stat().st_mtime <= built for w in words)


def _compile_one(source: Path, target: Path, command: list[str], versions: str) -> None:
    # Headers of the system are not among the dependencies: their versions stand for them.
    key = f"{shlex.join(command)}\n{versions}"
    if _is_current(target, key):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    run_quietly(command, f"Compiling {source.name}")
    target.with_suffix(".cmd").write_text(key)


def compile_objects(
    sources: Sequence[Path],
    build_dir: Path,
    compiler: str,
    flags: Sequence[str],
    versions: str = "",
) -> list[Path]:
    """Compile what is not up to date, as many files at once as there are cores.

    Args:
        sources: C++ files.
        build_dir: Where objects, dependency files and the commands used are kept.
        compiler: The C++ compiler.
        flags: All flags; objects made with others are made again.
        versions: Of what else goes in: TensorFlow, MPI, compiler. Likewise.

    Returns:
        The objects, in the order of `sources`.

    Raises:
        BuildError: The compiler refuses a file.
    """
    objects = [build_dir / s.parent.name / f"{s.stem}.o" for s in sources]

    def compile_one(pair: tuple[Path, Path]) -> None:
        source, target = pair
        depends = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        command = [compiler, *flags, *depends, "-c", str(source), "-o", str(target)]
        _compile_one(source, target, command, versions)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, zip(sources, objects, strict=True)))
    return objects


def common_flags(sources: Path) -> list[str]:
    """Return the flags of every file, also of the C++ tests."""
    return ["-std=c++17", "-fPIC", "-pthread", "-g1", "-Wall", "-Wextra", f"-I{sources}"]


def build(output_dir: Path, build_dir: Path, mpicxx: str | None = None) -> Path:
    """Build the shared library and its stamp.

    Args:
        output_dir: Where `libtfscale.so` and `build.json` go.
        build_dir: Where objects are kept between builds.
        mpicxx: MPI's compiler wrapper; None finds one.

    Returns:
        The library's path. The stamp beside it names the TensorFlow, compiler and MPI used.

    Raises:
        BuildError: Something is missing or does not compile.
    """
    root = find_sources()
    toolchain, tensorflow = find_toolchain(mpicxx), find_tensorflow(build_dir)
    base = [*common_flags(root), *_OPTIMISED, *toolchain.compile_flags]
    version = run_quietly([toolchain.compiler, "--version"], "The compiler").splitlines()[0]
    versions = ", ".join((tensorflow.version, toolchain.mpi, version))
    objects: list[Path] = []
    for room, extra in (("comm", ()), ("tf", tensorflow.compile_flags)):
        sources = sorted((root / room).glob("*.cc"))
        objects += compile_objects(
            sources, build_dir, toolchain.compiler, [*base, *extra], versions
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    library = output_dir / LIBRARY_NAME
    # Relative paths keep working when the environment moves; absolute ones serve other layouts.
    rpaths = ["-Wl,-rpath,$ORIGIN/../../tensorflow", "-Wl,-rpath,$ORIGIN/../../../.."]
    link = [*tensorflow.link_flags, *toolchain.link_flags, *rpaths, "-pthread"]
    unfinished = library.with_suffix(".new")
    command = [toolchain.compiler, "-shared", *map(str, objects), "-o", str(unfinished), *link]
    run_quietly(command, "Linking libtfscale.so")
    unfinished.replace(library)
    stamp = {"tensorflow": tensorflow.version, **asdict(toolchain), "compiler": version}
    stamp = {k: v for k, v in stamp.items() if not k.endswith("_flags")}
    (output_dir / STAMP_NAME).write_text(json.dumps(stamp, indent=2) + "\n")
    return library


def main(argv: Sequence[str] | None = None) -> int:
    """Run the build from the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="tfscale build", description=__doc__)
    parser.add_argument("--output", type=Path, default=PACKAGE / "_lib", help="folder to fill")
    parser.add_argument("--objects", type=Path, help="folder kept between builds")
    parser.add_argument("--mpicxx", help="MPI's compiler wrapper (default: found)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build(options.output, options.objects or Path(folder), options.mpicxx)
        except BuildError as error:
            sys.stderr.write(f"tfscale build: {error}\n")
            return 1
    sys.stdout.write(f"tfscale build: {library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
