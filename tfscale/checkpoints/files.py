"""The files of checkpoints: a part and a manifest for each rank, in a folder for each checkpoint.

Needs no TensorFlow. Arrays are in safetensors format, so other programs can read them. The library
of that name is not used: with numpy it cannot read float8 or slices of empty arrays, and it maps
files into memory, where an I/O error of a network file system kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from tfscale.files import sha256, sync_folder, write_atomically

FORMAT = 2
ARRAYS = ".safetensors"
MANIFEST = ".manifest"
# Error numbers of missing files, and of paths that are not files; None: truncated files, which this
# module reports. Not EIO: network file systems report it temporarily for sound files.
_DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_NAME = re.compile(r"step-(\d{10})-([0-9a-f]{8})")
_MARK = re.compile(r"\.[0-9a-f]{8}")  # see Saver.make_directory
_PART = re.compile(rf"rank-(\d{{5}}){re.escape(MANIFEST)}")
_CODES = {
    "bool": "BOOL", "complex64": "C64",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}"
       for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class DamagedError(Exception):
    """A file is missing, truncated or changed; the text names it and the reason."""


class UnreadableError(Exception):
    """A file may be sound, but cannot be read now; the text names it and the reason."""


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that one rank saves; arrays in files are read on access."""

    info: dict[str, Any]  # JSON: numbers, texts, lists, dicts
    arrays: Mapping[str, np.ndarray]  # of any dtype but object

    @staticmethod
    def stored(folder: Path, manifest: dict[str, Any]) -> Part:
        """Return the part that a manifest describes."""
        return Part(manifest["info"], _Arrays(folder / manifest["file"]))

    def slice(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return some elements of a flattened array; no others are read."""
        if isinstance(self.arrays, _Arrays):
            return self.arrays.read(name, start, stop)
        return self.arrays[name].reshape(-1)[start:stop]

    def series(self, name: str) -> list[str]:
        """Return the names "name/0", "name/1" and so on of arrays that exist."""
        numbered = (f"{name}/{i}" for i in itertools.count())
        return list(itertools.takewhile(self.arrays.__contains__, numbered))


def write_part(folder: Path, rank: int, part: Part) -> None:
    """Write a part: first the arrays, then the manifest with their checksum.

    Each file is written under a temporary name, forced to disk and renamed, so it is complete once
    it appears. A part without a manifest is unfinished. The folder is made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:05d}{ARRAYS}"
    digest, n_bytes = hashlib.sha256(), 0

    def write(file: IO[bytes]) -> None:
        nonlocal n_bytes
        for block in _blocks(part.arrays):
            file.write(block)
            digest.update(block)
            n_bytes += len(block)

    write_atomically(path, write)
    manifest = {
        "format": FORMAT,
        "rank": rank,
        "file": path.name,
        "bytes": n_bytes,
        "sha256": digest.hexdigest(),
        "info": part.info,
    }
    text = json.dumps(manifest).encode() + b"\n"
    write_atomically(path.with_suffix(MANIFEST), text + sha256(text).encode() + b"\n")
    sync_folder(folder)
    sync_folder(folder.parent)


def _blocks(arrays: Mapping[str, np.ndarray]) -> Iterator[Any]:
    """Yield the header of a safetensors file, and the bytes of its arrays."""
    header: dict[str, Any] = {"__metadata__": {}}
    offset = 0
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"Arrays of objects cannot be saved. Received: {name}.")
        code, shape = _CODES.get(array.dtype.name), list(array.shape)
        # For types unknown to the format: bytes, and the type in the metadata.
        if code is None or not array.dtype.isnative:
            type_name = array.dtype.str if array.dtype.kind != "V" else array.dtype.name
            header["__metadata__"][name] = type_name
            code, shape = "U8", [*shape, array.dtype.itemsize]
        end = offset + array.nbytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in arrays.values():
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class _Arrays(Mapping[str, np.ndarray]):
    """The arrays of a safetensors file. Errors are `DamagedError` and `UnreadableError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @functools.cached_property
    def _header(self) -> tuple[dict[str, Any], dict[str, str], int]:
        """Entries by name, types unknown to the format by name, and the offset of the data."""
        with reading(self._path), self._path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
            return entries, entries.pop("__metadata__", {}), 8 + length

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header[0])

    def __len__(self) -> int:
        return len(self._header[0])

    def __contains__(self, name: object) -> bool:
        return name in self._header[0]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return an array, or with `stop` some elements of it flattened."""
        entries, types, begin = self._header
        with reading(self._path), self._path.open("rb") as file:
            entry = entries[name]
            dtype, shape = _dtype(types.get(name, entry["dtype"])), entry["shape"]
            shape = shape[:-1] if name in types else shape
            first, end = entry["data_offsets"]
            n_elements = (end - first) // dtype.itemsize
            last = n_elements if stop is None else min(stop, n_elements)
            values = np.empty(max(last - start, 0), dtype)
            file.seek(begin + first + start * dtype.itemsize)
            if file.readinto(values.view(np.uint8).data) != values.nbytes:
                raise ValueError(f"{name} is cut short")
            return values.reshape(shape) if stop is None else values


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    name = next((own for own, code in _CODES.items() if code == name), name)
    return np.dtype(getattr(ml_dtypes, name, name))


def read_manifest(folder: Path, rank: int) -> dict[str, Any]:
    """Return the manifest that `write_part` wrote, checked."""
    path = folder / f"rank-{rank:05d}{MANIFEST}"
    with reading(path):
        content = path.read_bytes()
    text, _, seal = content.partition(b"\n")
    if seal != sha256(text + b"\n").encode() + b"\n":
        raise DamagedError(f"{path.name} does not match its own checksum")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT:
        raise DamagedError(f"{path.name} has format {manifest['format']}, not {FORMAT}")
    if (manifest["rank"], manifest["file"]) != (rank, path.with_suffix(ARRAYS).name):
        raise DamagedError(f"{path.name} is the manifest of {manifest['file']}")
    return manifest


def check_file(folder: Path, manifest: dict[str, Any], is_read: bool = True) -> None:
    """Compare the length, and with `is_read` the checksum, of a part's arrays with its manifest."""
    path = folder / manifest["file"]
    with reading(path):
        n_bytes = path.stat().st_size
        digest = sha256(path) if is_read and n_bytes == manifest["bytes"] else manifest["sha256"]
    if n_bytes != manifest["bytes"]:
        raise DamagedError(f"{path.name} has {n_bytes} bytes instead of {manifest['bytes']}")
    if digest != manifest["sha256"]:
        raise DamagedError(f"{path.name} does not match its checksum")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of reading a file, within a block, to those of this module."""
    try:
        yield
    except OSError as error:
        kind = DamagedError if error.errno in _DAMAGE else UnreadableError
        raise kind(f"{path.name}: {error.strerror or error}") from error
    except (KeyError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise DamagedError(f"{path.name}: {error}") from error


@dataclass(frozen=True)
class Found:
    """A checkpoint in its directory."""

    path: Path
    step: int  # training steps before it, from the beginning of the run
    size: int  # number of ranks that wrote it; 0 if no part is readable
    missing: tuple[int, ...]  # ranks whose parts are not finished
    unreadable: str = ""  # error of listing the folder

    @property
    def is_finished(self) -> bool:
        """Whether all parts exist; `check` verifies that they are sound."""
        return self.size > 0 and not self.missing

    def check(self, share: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
        """Compare all manifests with their checksums; return them in rank order.

        With `share` (i, n) only the i-th of n shares of the files is compared.

        Raises:
            DamagedError: A file is missing, cut or changed, or parts do not belong together.
            UnreadableError: The system does not allow the folder or a file to be read.
        """
        if self.unreadable:
            raise UnreadableError(self.unreadable)
        if not self.is_finished:
            raise DamagedError(self.why_unfinished())
        manifests = [read_manifest(self.path, rank) for rank in range(self.size)]
        keys = ("run", "step", "size")
        for rank, manifest in enumerate(manifests):
            if any(manifest["info"].get(k) != manifests[0]["info"].get(k) for k in keys):
                raise DamagedError(f"the parts of ranks 0 and {rank} do not belong together")
        for rank, manifest in enumerate(manifests):
            check_file(self.path, manifest, is_read=rank % share[1] == share[0])
        return manifests

    def why_unfinished(self) -> str:
        """Return a text that names the missing parts."""
        if not self.size:
            return "no rank has finished its part"
        shown = ", ".join(map(str, self.missing[:8]))
        more = f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
        return f"the parts of ranks {shown}{more} of {self.size} are not finished"


def folder_name(step: int, run: str) -> str:
    """Return the name of a checkpoint's folder; parts of different runs are never combined."""
    return f"step-{step:010d}-{run}"


def list_checkpoints(directory: str | Path) -> list[Found]:
    """Return the checkpoints in a directory, newest first, unfinished ones included.

    Args:
        directory: The directory given to `tfscale.callbacks.Checkpoint`; need not exist.

    Returns:
        The checkpoints; sorted by step, then by time of modification.

    Raises:
        UnreadableError: The system does not allow the directory to be listed.
    """
    found = []
    for match in filter(None, map(_NAME.fullmatch, _names_in(Path(directory)))):
        path = Path(directory) / match[0]
        with contextlib.suppress(DamagedError), reading(path):  # deleted after it was listed
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                found.append((int(match[1]), status.st_mtime, path))
    return [_look(path, step) for step, _, path in sorted(found, reverse=True)]


def prune(directory: Path, keep: int, runs: Collection[str]) -> None:
    """Delete unfinished checkpoints, and finished ones except for the `keep` newest.

    Checkpoints that cannot be read or deleted stay until the next call. Links are skipped and not
    counted, because their targets may not belong to the run. Unfinished checkpoints of `runs` that
    are newer than all finished ones stay: they are being written, or not all visible here yet.
    """
    n_finished = 0
    with contextlib.suppress(UnreadableError, OSError):  # there will be a next time
        for found in list_checkpoints(directory):
            if found.path.is_symlink():
                continue
            is_own = found.path.name.rpartition("-")[2] in runs
            is_left = not found.is_finished and (n_finished or not is_own)
            if (n_finished >= keep or is_left) and not found.unreadable:  # which may be sound
                delete(found.path)
            n_finished += found.is_finished


def delete(path: Path) -> None:
    """Delete a checkpoint, manifests first: after an interruption the rest counts as unfinished."""
    with contextlib.suppress(OSError, UnreadableError):  # there will be a next time
        for name in _names_in(path):
            if name.endswith(MANIFEST):
                (path / name).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def delete_all(directory: Path) -> None:
    """Delete all checkpoints, the newest last, and the directory if it is empty then."""
    with contextlib.suppress(OSError, UnreadableError):
        for found in reversed(list_checkpoints(directory)):
            if not found.path.is_symlink():
                delete(found.path)
        for name in filter(_MARK.fullmatch, _names_in(directory)):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


def set_aside(path: Path) -> Path | None:
    """Rename a damaged checkpoint, so that it is not checked again; return None if impossible."""
    numbers = itertools.chain(("",), (f"{n}-" for n in itertools.count(2)))
    paths = (path.with_name(f"damaged-{number}{path.name}") for number in numbers)
    new = next(candidate for candidate in paths if not os.path.lexists(candidate))
    try:
        return path.rename(new)
    except OSError:
        return None


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder, empty if it does not exist; `glob` would hide other errors."""
    with contextlib.suppress(DamagedError), reading(folder):  # there is no such folder
        return os.listdir(folder)
    return []


def _look(path: Path, step: int) -> Found:
    try:
        names = _names_in(path)
    except UnreadableError as error:
        return Found(path, step, 0, (), str(error))
    ranks = sorted(int(match[1]) for match in map(_PART.fullmatch, names) if match)
    for rank in ranks:
        try:
            size = int(read_manifest(path, rank)["info"]["size"])
        except (DamagedError, UnreadableError):
            continue
        missing = tuple(r for r in range(size) if r not in set(ranks))
        return Found(path, step, size, missing)
    # If all manifests are damaged, the run must not silently start over: `check` raises the error.
    return Found(path, step, len(ranks), ())
