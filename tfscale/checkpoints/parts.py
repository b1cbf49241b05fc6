"""One rank's part of a checkpoint: arrays in an .npz file, and a manifest that is written last."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

FORMAT = 1
ASIDE = ".unfinished"
MANIFEST = ".manifest"
_BLOCK = 2**20
# What the system says of files that are gone, or no files; numpy's errors of cut ones have none.
# EIO is not among them: network file systems report it in passing, of files that are sound.
_DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class DamagedError(Exception):
    """A file is not what was written; the text says which and why."""


class UnreadableError(Exception):
    """A file may be sound, but is not to be read now; the text says which and why."""


@dataclass(frozen=True)
class Part:
    """What one rank writes.

    Attributes:
        info: JSON: numbers, texts, lists, dicts.
        arrays: By name; any dtype but object.
    """

    info: dict[str, Any]
    arrays: dict[str, np.ndarray]


def write_part(folder: Path, rank: int, part: Part) -> None:
    """Write a part: first the arrays, then the manifest with their checksum.

    Each file is written under another name, forced to the disk and renamed, so it is complete
    where it appears. A part without a manifest does not count.

    Args:
        folder: Of the checkpoint; made if need be.
        rank: Whose part this is.
        part: The contents.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"rank-{rank:05d}.npz"
    special = {k: a.dtype.name for k, a in part.arrays.items() if a.dtype.kind == "V"}
    plain: dict[str, Any] = {
        name: array.view(f"u{array.dtype.itemsize}") if name in special else array
        for name, array in part.arrays.items()
    }
    write_aside(data, lambda file: np.savez(file, **plain))
    manifest = {
        "format": FORMAT,
        "rank": rank,
        "file": data.name,
        "bytes": data.stat().st_size,
        "sha256": _sha256(data),
        "dtypes": special,
        "info": part.info,
    }
    text = json.dumps(manifest).encode() + b"\n"
    seal = hashlib.sha256(text).hexdigest().encode() + b"\n"
    write_aside(data.with_suffix(MANIFEST), lambda file: file.write(text + seal))
    _sync_folder(folder)
    _sync_folder(folder.parent)


def read_manifest(folder: Path, rank: int) -> dict[str, Any]:
    """Return what `write_part` wrote beside the arrays.

    Raises:
        DamagedError: It is missing, cut or changed, of another format, or another rank's.
        UnreadableError: The system does not let it be read.
    """
    path = folder / f"rank-{rank:05d}{MANIFEST}"
    with reading(path):
        content = path.read_bytes()
    text, _, seal = content.partition(b"\n")
    if seal != hashlib.sha256(text + b"\n").hexdigest().encode() + b"\n":
        raise DamagedError(f"{path.name} does not match its own checksum")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT:
        raise DamagedError(f"{path.name} has format {manifest['format']}, not {FORMAT}")
    if (manifest["rank"], manifest["file"]) != (rank, path.with_suffix(".npz").name):
        raise DamagedError(f"{path.name} is the manifest of {manifest['file']}")
    return manifest


def check_size(folder: Path, manifest: dict[str, Any]) -> None:
    """Require that a part's arrays are there and as long as its manifest says.

    Raises:
        DamagedError: They are not.
    """
    path = folder / manifest["file"]
    with reading(path):
        n_bytes = path.stat().st_size
    if n_bytes != manifest["bytes"]:
        raise DamagedError(f"{path.name} has {n_bytes} bytes instead of {manifest['bytes']}")


def check_file(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare a part's arrays with the checksum in its manifest; reads all of the file.

    Raises:
        DamagedError: They differ.
    """
    check_size(folder, manifest)
    path = folder / manifest["file"]
    with reading(path):
        digest = _sha256(path)
    if digest != manifest["sha256"]:
        raise DamagedError(f"{path.name} does not match its checksum")


class Arrays:
    """A part's arrays, each read when it is asked for."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Open the file.

        Raises:
            DamagedError: It is not there, or no such file.
        """
        self._path = folder / manifest["file"]
        self._dtypes = manifest["dtypes"]
        with reading(self._path):
            self._file = np.load(self._path, allow_pickle=False)
        self.names = frozenset(self._file.files)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array.

        Raises:
            DamagedError: It is not there, or damaged.
        """
        with reading(self._path):
            array = self._file[name]
        return array.view(_dtype(self._dtypes[name])) if name in self._dtypes else array

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell what is damaged from what the system does not let be read, within a block.

    Raises:
        DamagedError: What is at the path is gone, or not what was written.
        UnreadableError: The system does not let it be read.
    """
    try:
        yield
    except OSError as error:
        kind = DamagedError if error.errno in _DAMAGE else UnreadableError
        raise kind(f"{path.name}: {error.strerror or error}") from error
    except (EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path.name}: {error}") from error


def _dtype(name: str) -> np.dtype:
    """Return a type that numpy knows by an extension only, such as bfloat16."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_aside(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file under another name, force it to the disk and rename it.

    Args:
        path: Where it appears, complete; what was there stays until then.
        write: Is given the open file.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    aside = path.with_name(path.name + ASIDE)
    try:
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Force names to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
