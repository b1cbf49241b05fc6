"""The native library that fits: in the package, or compiled once into the user's cache.

A library fits the C++ sources, TensorFlow, MPI and processor that are in use. The cache keeps one
for each combination, in a folder named after the key of its `identity`. Only the user may write
there, since the library is code that gets loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfscale.config import ExchangeError, environment
from tfscale.files import sync_folder
from tfscale.native import compiler
from tfscale.native.compiler import BuildError
from tfscale.native.cores import count_cores

PACKAGED = compiler.PACKAGE / "_lib"
# Seconds of compiling on one core, and on many; a message says so.
_COMPILE_ONE_CORE_S, _COMPILE_LEAST_S = 120, 20
_LOOK_S = 0.2
_UNFINISHED = "unfinished-"
# Errors of a file system that has no locks, such as NFS without its lock service.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def cache_folder() -> Path:
    """Return the folder of compiled libraries: $XDG_CACHE_HOME/tfscale, or ~/.cache/tfscale."""
    base = Path(environment().get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "tfscale"


def _require_own(folder: Path) -> None:
    """Raise ExchangeError unless this user alone can write to a folder."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ExchangeError(
            f"{folder} must be the user's own with mode 0700, since compiled libraries are "
            f"loaded from it. Received: user id {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}. Remove it (rm -r {folder}), or set "
            "XDG_CACHE_HOME to a folder of your own."
        )


def _is_of(kind: str, mpi: str) -> bool:
    """Return whether a library for `mpi` can be used under the launcher of an MPI `kind`.

    MPICH and Intel MPI are binary compatible, also between versions. Other words than "mpich",
    "intel" and "openmpi", such as "srun", fit any MPI.
    """
    is_open = mpi.startswith("Open MPI")
    return kind not in ("mpich", "intel", "openmpi") or is_open == (kind == "openmpi")


def _fits(stamp: Mapping[str, str], wanted: Mapping[str, str], kind: str) -> bool:
    """Compare a build record with `identity` of an unknown compiler and MPI."""
    if not _is_of(kind, stamp.get("mpi", "")):
        return False
    if stamp.get("tensorflow") != wanted["tensorflow"]:  # its C++ interface differs by version
        return False
    if stamp.get("sources", wanted["sources"]) != wanted["sources"]:  # old records have none
        return False
    # Of the C library any later version will do; a library that does not load is compiled again.
    machine = stamp.get("machine", wanted["machine"])
    return machine.partition(",")[0] == wanted["machine"].partition(",")[0]


def packaged_folders() -> list[Path]:
    """Return the folders of the package that hold a library: one, or one per TensorFlow."""
    folders = (PACKAGED, *sorted(PACKAGED.glob("*/")))
    return [folder for folder in folders if compiler.read_stamp(folder) is not None]


def find_packaged(kind: str = "") -> Path | None:
    """Return the package's library that fits TensorFlow and the launcher's MPI, or None."""
    wanted = compiler.identity(compiler.require_tensorflow())
    for folder in packaged_folders():
        if _fits(compiler.read_stamp(folder) or {}, wanted, kind):
            return folder / compiler.LIBRARY_NAME
    return None


def key_of(stamp: Mapping[str, str]) -> str:
    """Return the name of a library's folder in the cache."""
    return hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:16]


def _older_instead(tensorflow: str) -> str:
    """Return the remedy where a TensorFlow is so new that no library comes with the package."""
    return (
        f"Or use a TensorFlow that was tested, {compiler.tested('tensorflow')} instead of "
        f"{tensorflow}: pip install 'tensorflow{compiler.ceiling('tensorflow')}'."
    )


def _find_toolchain(kind: str) -> compiler.Toolchain:
    try:
        toolchain = compiler.find_toolchain()
    except BuildError as error:
        version = compiler.require_tensorflow()
        if not compiler.is_untested("tensorflow", version):
            raise
        raise BuildError(f"{error} {_older_instead(version)}") from error
    if not _is_of(kind, toolchain.mpi):
        raise BuildError(
            f"mpicxx and the launcher must be of one MPI. Received: a launcher of {kind}, and "
            f"{toolchain.mpicxx} of {toolchain.mpi}. Put the folder of one MPI first on PATH, or "
            "choose: tfscale build --mpicxx PATH."
        )
    return toolchain


def find_cached(kind: str = "") -> Path | None:
    """Return the library of the user's cache that fits, or None.

    Without a compiler here, one that another host with the same home folder has compiled.
    """
    folder, wanted = cache_folder(), compiler.identity(compiler.require_tensorflow())
    if not folder.exists():
        return None
    _require_own(folder)
    try:
        keys = [key_of(compiler.identity(wanted["tensorflow"], _find_toolchain(kind)))]
    except BuildError:
        keys = [
            one.key
            for one in cached_libraries()
            if _fits(one.stamp, wanted, kind) and one.stamp.get("machine") == wanted["machine"]
        ]
    for key in keys:
        if compiler.read_stamp(folder / key) is not None:
            _require_own(folder / key)
            return folder / key / compiler.LIBRARY_NAME
    return None


def find_library(kind: str = "") -> Path | None:
    """Return the library that fits, of the package or the cache; None where there is none yet.

    Args:
        kind: MPI of the launcher, see `tfscale.comm.process.Launch.launcher`; "" for any.

    Raises:
        BuildError: There is no TensorFlow.
        ExchangeError: Others may write to the cache.
    """
    return find_packaged(kind) or find_cached(kind)


def prepare_library(kind: str = "", who: str = "", is_packaged: bool = True) -> Path:
    """Return the library that fits; compile it into the user's cache if there is none.

    Processes of a host, and of hosts that share the folder, wait for the one that compiles.

    Args:
        kind: As in `find_library`.
        who: Name of this process in messages.
        is_packaged: Whether the package's library may be used.

    Raises:
        BuildError: Something is missing, such as a compiler; the text says how to install it.
        ExchangeError: The cache is not writable, or others may write to it.
    """
    try:
        path = find_library(kind) if is_packaged else find_cached(kind)
        if path is not None:
            return path
        toolchain = _find_toolchain(kind)
        return _compile_once(compiler.identity(compiler.require_tensorflow(), toolchain), who)
    except OSError as error:
        raise ExchangeError(
            f"Could not write the library into the user's cache. Received: {error}. Set "
            "XDG_CACHE_HOME to a folder of your own, or compile the library into the package: "
            "tfscale build."
        ) from error


def _compile_once(stamp: Mapping[str, str], who: str) -> Path:
    """Compile a library into the user's cache, or wait for the process that does."""
    folder = cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_own(folder)
    target = folder / key_of(stamp)
    duration = f"about {max(_COMPILE_LEAST_S, _COMPILE_ONE_CORE_S // count_cores())} s"
    with _locked(folder / "lock", who, duration) as is_locked:
        names = os.listdir(folder)  # NFS then shows what other hosts have made, too
        if compiler.read_stamp(target) is None:
            for name in names if is_locked else ():  # no other process compiles
                if name.startswith(_UNFINISHED):
                    shutil.rmtree(folder / name, ignore_errors=True)  # of a killed one
            if target.exists():
                _say(who, f"{target} holds no whole library: it was cut or changed.")
            versions = f"TensorFlow {stamp['tensorflow']} and {stamp['mpi']}"
            _say(who, f"compiling the library for {versions}, once on this machine: {duration}.")
            started = time.monotonic()
            _compile_into(target)
            _say(who, f"compiled in {time.monotonic() - started:.0f} s, kept in {target}.")
    _require_own(target)
    return target / compiler.LIBRARY_NAME


def _say(who: str, text: str) -> None:
    sys.stderr.write(f"tfscale: {who}{': ' if who else ''}{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _locked(path: Path, who: str, duration: str) -> Iterator[bool]:
    """Hold a lock while the context is open; yield False at once where files cannot be locked.

    The kernel, or the server of NFS, releases the lock of a process that dies. Without locks,
    several processes compile the same library, and the first to finish leaves it to all.
    """
    with path.open("a+") as file:
        is_locked, is_told = False, False
        while not is_locked:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    break
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                if not is_told:
                    holder = path.read_text() or "another process"
                    _say(who, f"waiting for {holder}, which compiles the library: {duration}.")
                is_told = True
                time.sleep(_LOOK_S)
        if is_locked:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        try:
            yield is_locked
        finally:
            if is_locked:
                file.truncate(0)


def _compile_into(target: Path) -> None:
    """Compile the library beside a folder, and give it the folder's name when it is complete."""
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=target.parent) as name:
        made = Path(name) / "made"
        made.mkdir(mode=0o700)
        compiler.build(made, Path(name) / "objects")
        if compiler.read_stamp(target) is None:  # what is there is damaged
            with contextlib.suppress(FileNotFoundError):
                target.rename(Path(name) / "damaged")
        try:
            made.rename(target)
        except OSError:  # without locks, another process may have been faster
            if compiler.read_stamp(target) is None:
                raise
        sync_folder(target.parent)


@dataclass(frozen=True)
class Cached:
    """A library in the user's cache."""

    key: str
    stamp: dict[str, str]
    n_bytes: int


def cached_libraries() -> list[Cached]:
    """Return the libraries of the user's cache, the newest first."""
    libraries = []
    for path in cache_folder().glob(f"*/{compiler.LIBRARY_NAME}"):
        stamp = compiler.read_stamp(path.parent)
        if stamp is not None and not path.parent.name.startswith(_UNFINISHED):
            status = path.stat()
            libraries.append((status.st_mtime, Cached(path.parent.name, stamp, status.st_size)))
    return [one for _, one in sorted(libraries, key=lambda pair: -pair[0])]


def damaged_folders() -> list[Path]:
    """Return the folders of the user's cache whose library or record is cut or unreadable."""
    names = (compiler.LIBRARY_NAME, compiler.STAMP_NAME)
    folders = {path.parent for name in names for path in cache_folder().glob(f"*/{name}")}
    finished = [folder for folder in folders if not folder.name.startswith(_UNFINISHED)]
    return sorted(folder for folder in finished if compiler.read_stamp(folder) is None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tfscale build`; return the exit code."""
    parser = argparse.ArgumentParser(prog="tfscale build", description=__doc__)
    add_options(parser)
    return run(parser.parse_args(argv))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the build command."""
    parser.add_argument("--output", type=Path, help="folder to fill (default: the package's)")
    parser.add_argument("--objects", type=Path, help="folder kept between builds")
    parser.add_argument("--mpicxx", metavar="PATH", help="MPI's compiler wrapper (default: found)")


def run(options: argparse.Namespace) -> int:
    """Build as the options say; return the exit code."""
    output = options.output or PACKAGED
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = compiler.build(output, options.objects or Path(folder), options.mpicxx)
        except BuildError as error:
            sys.stderr.write(f"tfscale build: {error}\n")
            return 1
        except PermissionError as error:
            sys.stderr.write(
                f"tfscale build: {error}. The package need not be writable: `tfscale run` compiles "
                f"the library into {cache_folder()} at its first start.\n"
            )
            return 1
    sys.stdout.write(f"tfscale build: {library}\n")
    return 0
