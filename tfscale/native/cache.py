"""The native libraries that fit: of the package, or compiled once into the user's cache.

There are two: the engine, made for the ABI of an MPI, and the ops, made for a TensorFlow. A folder
holds one library and its build record, whose `identity` says what it fits. In the cache the folder
is named after it. Only the user may write there, since the libraries are code that gets loaded.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfscale.config import ExchangeError, environment
from tfscale.files import sync_folder
from tfscale.native import compiler
from tfscale.native.compiler import ENGINE, OPS, BuildError
from tfscale.native.cores import count_cores
from tfscale.native.mpi_library import MpiLibrary

PACKAGED = compiler.PACKAGE / "_lib"
# Seconds of compiling on one core, and on many; a message says so.
_COMPILE_ONE_CORE_S, _COMPILE_LEAST_S = {ENGINE: 80, OPS: 40}, 20
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


@dataclass(frozen=True)
class Libraries:
    """The files of an engine and of ops that fit each other, TensorFlow and an MPI."""

    mpi: MpiLibrary
    engine: Path
    ops: Path

    def places(self) -> str:
        """Return where the files are, and why, in words."""
        told = []
        for path in (self.engine, self.ops):
            is_packaged = path.is_relative_to(PACKAGED)
            origin = "of the package" if is_packaged else f"compiled here, key {path.parent.name}"
            target = (compiler.read_stamp(path.parent) or {}).get("target", "")
            target = f"TensorFlow {target}" if path == self.ops else target
            told.append(f"{path} for {target} ({origin})")
        return f"{' and '.join(told)}, with {self.mpi}"


def _fits(stamp: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Compare the build record of a library of the package with an `identity`."""
    if any(stamp.get(name) != wanted[name] for name in ("part", "target", "sources")):
        return False
    # Of the C library any later version will do; a library that does not load is compiled again.
    return stamp.get("machine", "").partition(",")[0] == wanted["machine"].partition(",")[0]


def packaged_folders() -> list[Path]:
    """Return the folders of the package that hold a library."""
    return [path for path in sorted(PACKAGED.glob("*/")) if compiler.read_stamp(path) is not None]


def built_for() -> list[str]:
    """Return the MPI libraries for which engines of the package were made on this machine."""
    stamps = [compiler.read_stamp(folder) or {} for folder in packaged_folders()]
    return [path for stamp in stamps if (path := stamp.get("libmpi", "")) and os.path.exists(path)]


def key_of(stamp: Mapping[str, str]) -> str:
    """Return the name of a library's folder in the cache."""
    return hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:16]


def find_library(part: str, target: str, refused: frozenset[str] = frozenset()) -> Path | None:
    """Return the library that fits, of the package or the cache; None where there is none yet.

    Args:
        part: `compiler.ENGINE` or `compiler.OPS`.
        target: Soname of the MPI, or `compiler.target_of` the TensorFlow.
        refused: Digests of libraries that did not load here.

    Raises:
        ExchangeError: Others may write to the cache.
    """
    wanted = compiler.identity(part, target)
    for folder in packaged_folders():
        stamp = compiler.read_stamp(folder) or {}
        if _fits(stamp, wanted) and stamp[compiler.DIGEST] not in refused:
            return compiler.shared_object(folder, part)
    folder = cache_folder()
    if not folder.exists():
        return None
    _require_own(folder)
    target_folder = folder / key_of(wanted)
    if not _is_usable(target_folder, wanted, refused):
        return None
    _require_own(target_folder)
    return compiler.shared_object(target_folder, part)


def _is_usable(folder: Path, wanted: Mapping[str, str], refused: frozenset[str]) -> bool:
    stamp = compiler.read_stamp(folder) or {}
    return wanted.items() <= stamp.items() and stamp[compiler.DIGEST] not in refused


def digests(libraries: Libraries) -> frozenset[str]:
    """Return the digests of libraries, for `refused`."""
    stamps = [compiler.read_stamp(path.parent) or {} for path in (libraries.engine, libraries.ops)]
    return frozenset(stamp.get(compiler.DIGEST, "") for stamp in stamps)


def prepare_libraries(
    mpi: MpiLibrary, who: str = "", refused: frozenset[str] = frozenset()
) -> Libraries:
    """Return the libraries that fit; compile into the user's cache what is missing.

    Processes of a host, and of hosts that share the folder, wait for the one that compiles.

    Args:
        mpi: The MPI of the ranks, see `mpi_library`.
        who: Name of this process in messages.
        refused: As in `find_library`.

    Raises:
        BuildError: Something is missing, such as a compiler; the text says how to install it.
        ExchangeError: The cache is not writable, or others may write to it.
    """
    tensorflow = compiler.require_tensorflow()
    target = compiler.target_of(tensorflow)
    try:
        engine = find_library(ENGINE, mpi.soname, refused)
        if engine is None:
            engine = _compile_once(ENGINE, mpi.soname, who, refused, _engine_of(mpi))
        ops = find_library(OPS, target, refused)
        if ops is None:
            ops = _compile_once(OPS, target, who, refused, _ops_with(engine, tensorflow))
        return Libraries(mpi, engine, ops)
    except OSError as error:
        raise ExchangeError(
            f"Could not write the library into the user's cache. Received: {error}. Set "
            "XDG_CACHE_HOME to a folder of your own, or compile the library into the package: "
            "tfscale build."
        ) from error


def _engine_of(mpi: MpiLibrary) -> Callable[[Path, Path], Path]:
    """Return the function that compiles the engine.

    Raises:
        BuildError: There is no compiler or MPI for it.
    """
    toolchain = compiler.find_toolchain()
    soname = toolchain.find_soname()
    if soname != mpi.soname:
        raise BuildError(
            "mpicxx must be of the MPI that the engine will use. Received: "
            f"{toolchain.mpicxx} of {soname}, and {mpi}. Put the folder of one MPI first on PATH, "
            "or choose: tfscale build --mpicxx PATH."
        )
    return lambda output, objects: compiler.build_engine(output, objects, toolchain)


def _ops_with(engine: Path, tensorflow: str) -> Callable[[Path, Path], Path]:
    """Return the function that compiles the ops.

    Raises:
        BuildError: There is no compiler.
    """
    try:
        compiler.find_compiler()
    except BuildError as error:
        raise BuildError(f"{error} {_older_instead(tensorflow)}") from error

    def build(output: Path, objects: Path) -> Path:
        return compiler.build_ops(output, objects, compiler.find_tensorflow(objects), engine)

    return build


def _older_instead(tensorflow: str) -> str:
    """Return the remedy where no ops for a TensorFlow come with the package."""
    stamps = [compiler.read_stamp(folder) or {} for folder in packaged_folders()]
    have = [stamp["target"] for stamp in stamps if stamp["part"] == OPS]
    versions = ", ".join(sorted(have)) or compiler.tested("tensorflow")
    bound = compiler.ceiling("tensorflow")
    if not compiler.is_untested("tensorflow", tensorflow) and have:
        bound = f"=={max(have, key=compiler.minor)}.*"
    return (
        f"Or use a TensorFlow for which they are there, {versions} instead of {tensorflow}: "
        f"pip install 'tensorflow{bound}'."
    )


def _compile_once(
    part: str, target: str, who: str, refused: frozenset[str], build: Callable[[Path, Path], Path]
) -> Path:
    """Compile a library into the user's cache, or wait for the process that does."""
    stamp, folder = compiler.identity(part, target), cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_own(folder)
    kept = folder / key_of(stamp)
    seconds = max(_COMPILE_LEAST_S, _COMPILE_ONE_CORE_S[part] // count_cores())
    with _locked(folder / "lock", who, f"about {seconds} s") as is_locked:
        names = os.listdir(folder)  # NFS then shows what other hosts have made, too
        if not _is_usable(kept, stamp, refused):
            for name in names if is_locked else ():  # no other process compiles
                if name.startswith(_UNFINISHED):
                    shutil.rmtree(folder / name, ignore_errors=True)  # of a killed one
            if kept.exists() and compiler.read_stamp(kept) is None:
                _say(who, f"{kept} holds no whole library: it was cut or changed.")
            name = f"engine for {target}" if part == ENGINE else f"ops for TensorFlow {target}"
            _say(who, f"compiling the {name}, once on this machine: about {seconds} s.")
            started = time.monotonic()
            _compile_into(kept, stamp, refused, build)
            _say(who, f"compiled in {time.monotonic() - started:.0f} s, kept in {kept}.")
    _require_own(kept)
    return compiler.shared_object(kept, part)


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


def _compile_into(
    target: Path,
    stamp: Mapping[str, str],
    refused: frozenset[str],
    build: Callable[[Path, Path], Path],
) -> None:
    """Compile a library beside a folder, and give it the folder's name when it is complete."""
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=target.parent) as name:
        made = Path(name) / "made"
        made.mkdir(mode=0o700)
        build(made, Path(name) / "objects")
        if not _is_usable(target, stamp, refused):  # what is there is damaged, or does not load
            with contextlib.suppress(FileNotFoundError):
                target.rename(Path(name) / "damaged")
        try:
            made.rename(target)
        except OSError:  # without locks, another process may have been faster
            if not _is_usable(target, stamp, refused):
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
    for path in _libraries_in(cache_folder()):
        stamp = compiler.read_stamp(path.parent)
        if stamp is not None and not path.parent.name.startswith(_UNFINISHED):
            status = path.stat()
            libraries.append((status.st_mtime, Cached(path.parent.name, stamp, status.st_size)))
    return [one for _, one in sorted(libraries, key=lambda pair: -pair[0])]


def _libraries_in(folder: Path) -> list[Path]:
    return list(folder.glob("*/libtfscale_*.so"))


def damaged_folders() -> list[Path]:
    """Return the folders of the user's cache whose library or record is cut or unreadable."""
    paths = (*_libraries_in(cache_folder()), *cache_folder().glob(f"*/{compiler.STAMP_NAME}"))
    folders = {path.parent for path in paths}
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
            paths = build(output, options.objects or Path(folder), options.mpicxx)
        except BuildError as error:
            sys.stderr.write(f"tfscale build: {error}\n")
            return 1
        except PermissionError as error:
            sys.stderr.write(
                f"tfscale build: {error}. The package need not be writable: `tfscale run` compiles "
                f"the library into {cache_folder()} at its first start.\n"
            )
            return 1
    for path in paths:
        sys.stdout.write(f"tfscale build: {path}\n")
    return 0


def build(output: Path, objects: Path, mpicxx: str | None = None) -> tuple[Path, Path]:
    """Build the libraries for an MPI and the installed TensorFlow, each in a folder of `output`.

    `objects` keeps compiled files; `mpicxx` is MPI's compiler wrapper, None finds one.
    """
    toolchain, tensorflow = compiler.find_toolchain(mpicxx), compiler.find_tensorflow(objects)
    target = compiler.target_of(tensorflow.version)
    folder = output / f"{ENGINE}-{toolchain.find_soname()}"
    engine = compiler.build_engine(folder, objects, toolchain)
    return engine, compiler.build_ops(output / f"{OPS}-{target}", objects, tensorflow, engine)
