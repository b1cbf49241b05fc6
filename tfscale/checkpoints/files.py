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
import io
import itertools
import json
import math
import os
import random
import re
import reprlib
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
_DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_NAME = re.compile(r"step-([0-9]{10})-([0-9a-f]{8})")
_MARK = re.compile(r"\.[0-9a-f]{8}")  # see Saver.make_directory
_PART = re.compile(rf"rank-([0-9]{{5}}){re.escape(MANIFEST)}")
_MAX_RANKS = 10**5  # the digits in names of parts
_MAX_COUNT = 2**53  # JSON's exact integers
_MAX_DEPTH = 100  # of a manifest; that of a snapshot is below 10 without states of callbacks
_MAX_MANIFEST_BYTES = 2**30
_SHOWN = 200  # letters of a reason
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


# Errors of reading a file whose content is not as expected.
_MALFORMED = (
    *(KeyError, IndexError, AttributeError, ValueError, TypeError),
    *(OverflowError, MemoryError, RecursionError),
)


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
            raise TypeError(f"arrays of objects cannot be saved. Received: {name}.")
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
        with reading(self._path), _opened(self._path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(min(length, n_bytes)))
            types = entries.pop("__metadata__", {})
            _require_entries(entries, types, n_bytes - 8 - length)
            return entries, types, 8 + length

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header[0])

    def __len__(self) -> int:
        return len(self._header[0])

    def __contains__(self, name: object) -> bool:
        return name in self._header[0]

    def shape(self, name: str) -> list[int] | None:
        """Return the shape of an array; None if there is none of this name."""
        entries, types, _ = self._header
        shape: list[int] | None = entries[name]["shape"] if name in entries else None
        return shape[:-1] if shape is not None and name in types else shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return an array, or with `stop` some elements of it flattened."""
        entries, types, begin = self._header
        with reading(self._path), _opened(self._path) as file:
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

    name = next((dtype for dtype, code in _CODES.items() if code == name), name)
    return np.dtype(getattr(ml_dtypes, name, name))


def read_manifest(folder: Path, rank: int) -> dict[str, Any]:
    """Return the manifest that `write_part` wrote, checked; `require_info` checks its "info"."""
    path = folder / f"rank-{rank:05d}{MANIFEST}"
    with reading(path), _opened(path) as file:
        content = file.read(_MAX_MANIFEST_BYTES)
    text, _, seal = content.partition(b"\n")
    if seal != sha256(text + b"\n").encode() + b"\n":
        raise DamagedError(f"{path.name} does not match its own checksum")
    with reading(path):
        manifest: dict[str, Any] = json.loads(text)
        _require_depth(manifest)
        if manifest["format"] != FORMAT:
            raise DamagedError(f"{path.name} has format {manifest['format']}, not {FORMAT}")
        _require_fields(manifest, _MANIFEST)
    if (manifest["rank"], manifest["file"]) != (rank, path.with_suffix(ARRAYS).name):
        raise DamagedError(f"{path.name} is the manifest of {manifest['file']}")
    return manifest


def check_file(folder: Path, manifest: dict[str, Any], is_read: bool = True) -> None:
    """Compare the length, and with `is_read` the checksum, of a part's arrays with its manifest."""
    path = folder / manifest["file"]
    digest = manifest["sha256"]
    with reading(path), _opened(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if is_read and n_bytes == manifest["bytes"]:
            digest = sha256(file)
    if n_bytes != manifest["bytes"]:
        raise DamagedError(f"{path.name} has {n_bytes} bytes instead of {manifest['bytes']}")
    if digest != manifest["sha256"]:
        raise DamagedError(f"{path.name} does not match its checksum")


def _opened(path: Path) -> io.BufferedReader:
    """Open a regular file; opening or reading anything else, such as a pipe, may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("this is no regular file")
    # Without O_NONBLOCK it would wait for a pipe that replaced the file just now.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of reading a file, within a block, to those of this module."""
    try:
        yield
    except OSError as error:
        kind = DamagedError if error.errno in _DAMAGE else UnreadableError
        raise kind(f"{path.name}: {error.strerror or error}") from error
    except _MALFORMED as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise DamagedError(f"{path.name}: {text[:_SHOWN]}") from error


# Forms of the values in a manifest. A form is a type; a predicate; a tuple of alternatives; a list
# of one form for any number of items, or of several for as many; a dict of forms by name, or by
# `...` for all names.


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_random_state(value: Any) -> bool:
    """Return whether generators take the states that a snapshot has read from them."""
    of_numpy = value["numpy"]
    if not (_is_count(of_numpy["state"]["pos"]) and of_numpy["state"]["pos"] <= 624):
        return False  # numpy would read past the end of its key
    version, words, gauss = value["python"]
    random.Random().setstate((version, tuple(words), gauss))
    np.random.RandomState().set_state(of_numpy)
    return _fits(value.get("keras"), (type(None), [_is_count, _is_count]))


_MANIFEST: dict[str, Any] = {
    "format": int, "rank": _is_count, "file": str, "bytes": _is_count, "sha256": str, "info": dict
}  # fmt: skip
_SHAPES = [[str, [_is_count]]]
# What a snapshot writes (snapshot_restore.py).
_INFO: dict[str, Any] = {
    "run": str,
    "step": _is_count,
    "size": _is_count,
    "groups": [[_is_count]],
    "position": {
        "epoch": _is_count,
        "step": _is_count,
        "n_steps": _is_count,
        "data": (
            type(None),
            {"epoch": int, "batch_size": int, "seed": int, "samples": int},
            {"epoch": _is_count, "batch_size": _is_count, "samples": _is_count, "left": _is_count},
        ),
    },
    "is_end": bool,
    "random": _is_random_state,
    "weights": _SHAPES,
    "rules": [{"class": str, "n": _is_count, "slots": [str]}],
    "ranges": {...: (type(None), [_is_count, _is_count])},
    "accumulated": [_is_count],
    "metrics": _SHAPES,
    "callbacks": [{"kind": str, "state": dict}],
    "keras_callbacks": [{"kind": str, "numbers": {...: (type(None), bool, int, float)}}],
}
_LATER_INFO: dict[str, Any] = {  # older checkpoints have none
    "trained": [[(type(None), _is_count)]],
    "residuals": {...: [[_is_count], (int, float)]},
    # Of averages, see GroupAverage.saved: a factor, first elements of the rank's and of the owner's
    # part, numbers of five arrays, and the first element in two of them.
    "pending": {...: [(int, float), _is_count, _is_count, _is_count, *[int] * 4, _is_count]},
    "n_quantized": [_is_count],
    "hosts": [int],
    "tables": [[str, _is_count, _is_count, _is_count, _is_count]],
}


def empty_info() -> dict[str, Any]:
    """Return the lists and names of a manifest's "info", empty."""
    forms = (_INFO | _LATER_INFO).items()
    return {
        name: type(form)()
        for name, form in forms
        if isinstance(form, list) or (isinstance(form, dict) and ... in form)
    }


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, tuple):
        return any(_fits(value, one) for one in form)
    if isinstance(form, type):
        return type(value) is form  # not `isinstance`: True would be an integer
    if isinstance(form, list):
        forms = form * len(value) if isinstance(value, list) and len(form) == 1 else form
        return (
            isinstance(value, list) and len(value) == len(forms) and all(map(_fits, value, forms))
        )
    if isinstance(form, dict):
        if not isinstance(value, dict) or (... not in form and value.keys() != form.keys()):
            return False
        return all(_fits(item, form.get(..., form.get(name))) for name, item in value.items())
    return bool(form(value))


def _require_fields(values: dict[str, Any], forms: Mapping[str, Any]) -> None:
    for name, form in forms.items():
        if not _fits(values[name], form):
            raise ValueError(f"{name} is {reprlib.repr(values[name])}")


def _require_depth(value: Any) -> None:
    """Raise ValueError if a value is too deep for functions that call themselves, as pickle's."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [item for item in level if isinstance(item, list | dict)]
        level = [i for item in nested for i in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise ValueError(f"it has more than {_MAX_DEPTH} levels")


def require_info(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise DamagedError unless a snapshot can be restored from a manifest's "info"."""
    info = manifest["info"]
    with reading((folder / manifest["file"]).with_suffix(MANIFEST)):
        _require_fields(info, _INFO)
        _require_fields(info, {k: form for k, form in _LATER_INFO.items() if k in info})
        size, n_weights, n_optimizers = info["size"], len(info["weights"]), len(info["rules"])
        trained = [i for places in info.get("trained", []) for i in places if i is not None]
        saved = [*info["ranges"], *info.get("residuals", {}), *info.get("pending", {})]
        names = [re.fullmatch(r"[0-9]{1,9}/(weight)?([0-9]{1,9})", name) for name in saved]
        of_weights = names[len(info["ranges"]) :] + [m for m in names if m and m[1]]
        for name, is_right in {
            "size": 1 <= size <= _MAX_RANKS,
            "groups": sorted(itertools.chain(*info["groups"]))
            == list(range(min(size, _MAX_RANKS))),
            "position": info["position"]["n_steps"] == info["step"],
            "trained": all(i < n_weights for i in trained),
            "accumulated": len(info["accumulated"]) == n_optimizers,
            "n_quantized": len(info.get("n_quantized", info["rules"])) == n_optimizers,
            "ranges": None not in names and all(int(m[2]) < n_weights for m in of_weights if m),
        }.items():
            if not is_right:
                raise ValueError(f"{name} is {reprlib.repr(info.get(name))}")


def _require_entries(entries: Any, types: Any, n_bytes: int) -> None:
    """Raise ValueError unless the header of a file with `n_bytes` of arrays can be used."""
    entry_form = {"dtype": str, "shape": [_is_count], "data_offsets": [_is_count, _is_count]}
    if not (_fits(entries, {...: entry_form}) and _fits(types, {...: str})):
        raise ValueError("its header is not that of arrays")
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape = entry["shape"][:-1] if name in types else entry["shape"]
        item = _dtype(types.get(name, entry["dtype"]))
        if item.hasobject or end > n_bytes or math.prod(shape) * item.itemsize != end - begin:
            raise ValueError(f"{name} is {reprlib.repr(entry)}")


@dataclass(frozen=True)
class Found:
    """A checkpoint in its directory."""

    path: Path
    step: int  # training steps before it, from the beginning of the run
    size: int  # number of ranks that wrote it; 0 if no part is readable
    missing: tuple[int, ...]  # ranks whose parts are not finished
    unreadable: str = ""  # error of listing the folder
    damage: str = ""  # seen in the manifests that were read for the list

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
        for rank, manifest in enumerate(manifests):
            require_info(self.path, manifest)
            if difference := _name_of_another(self.path, manifest):
                raise DamagedError(difference)
            if _common(manifest["info"]) != _common(manifests[0]["info"]):
                raise DamagedError(f"the parts of ranks 0 and {rank} do not belong together")
        for rank, manifest in enumerate(manifests):
            is_read = rank % share[1] == share[0]
            check_file(self.path, manifest, is_read)
            if is_read:
                _require_weights(self.path, manifest)
        return manifests

    def why_unfinished(self) -> str:
        """Return a text that names the missing parts."""
        if not self.size:
            return "no rank has finished its part"
        shown = ", ".join(map(str, self.missing[:8]))
        more = f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
        return f"the parts of ranks {shown}{more} of {self.size} are not finished"


def _common(info: dict[str, Any]) -> list[Any]:
    """Return the fields that must be equal in all parts of a checkpoint."""
    return [info["size"], info["groups"], len(info["callbacks"])]


def _require_weights(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise DamagedError unless the first rank of a group has weights of the shapes it names."""
    arrays, info = _Arrays(folder / manifest["file"]), manifest["info"]
    is_first = any(group[:1] == [manifest["rank"]] for group in info["groups"])
    for i, (path, shape) in enumerate(info["weights"] if is_first else ()):
        if arrays.shape(f"weight/{i}") != shape:
            raise DamagedError(f"{manifest['file']} has no weight {path} of shape {shape}")


def _name_of_another(folder: Path, manifest: dict[str, Any]) -> str:
    """Return a text if a manifest is not that of a checkpoint with the name of its folder."""
    step, run = manifest["info"]["step"], manifest["info"]["run"]
    if folder.name == folder_name(step, run):
        return ""
    name = Path(manifest["file"]).with_suffix(MANIFEST)
    return f"{name} is of step {step} of run {run[:99]!r}, not of {folder.name}"


def folder_name(step: int, run: str) -> str:
    """Return the name of a checkpoint's folder, with the run: another run's parts do not fit."""
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
    folders = []
    for match in filter(None, map(_NAME.fullmatch, _names_in(Path(directory)))):
        path = Path(directory) / match[0]
        with contextlib.suppress(DamagedError), reading(path):  # deleted after it was listed
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                folders.append((int(match[1]), status.st_mtime, path))
    return [_look(path, step) for step, _, path in sorted(folders, reverse=True)]


def prune(directory: Path, keep: int, runs: Collection[str]) -> None:
    """Delete unfinished checkpoints, and finished ones except for the `keep` newest.

    Those that the list shows as damaged are not counted. Checkpoints that cannot be read or
    deleted stay until the next call. Links are skipped and not counted, because their targets may
    not belong to the run. Unfinished checkpoints of `runs` that are newer than all finished ones
    stay: they are being written, or not all visible here yet.
    """
    n_finished = 0
    with contextlib.suppress(UnreadableError, OSError):  # there will be a next time
        for checkpoint in list_checkpoints(directory):
            if checkpoint.path.is_symlink():
                continue
            is_own = checkpoint.path.name.rpartition("-")[2] in runs
            is_left = not checkpoint.is_finished and (n_finished or not is_own)
            if (n_finished >= keep or is_left) and not checkpoint.unreadable:  # which may be sound
                delete(checkpoint.path)
            n_finished += checkpoint.is_finished and not checkpoint.damage


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
        for checkpoint in reversed(list_checkpoints(directory)):
            if not checkpoint.path.is_symlink():
                delete(checkpoint.path)
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
    damage = ""
    for rank in ranks:
        try:
            manifest = read_manifest(path, rank)
            require_info(path, manifest)
        except (DamagedError, UnreadableError) as error:
            damage = damage or (str(error) if isinstance(error, DamagedError) else "")
            continue
        size = manifest["info"]["size"]
        missing = tuple(sorted(set(range(size)).difference(ranks)))
        return Found(path, step, size, missing, "", damage or _name_of_another(path, manifest))
    # If all manifests are damaged, the run must not silently start over: `check` raises the error.
    return Found(path, step, len(ranks), (), "", damage)
