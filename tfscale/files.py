"""Atomic file writes, digests, JSON-lines files and measurement results."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

UNFINISHED = ".unfinished"
_BLOCK = 2**20


def write_atomically(path: str | Path, content: bytes | str | Callable[[IO[bytes]], Any]) -> None:
    """Write a file under another name, flush it to the disk and rename it.

    A process that is killed leaves the earlier file, or none. `content` may be a function that
    writes to the open file; the folder must exist.
    """
    path = Path(path)
    aside = path.with_name(path.name + UNFINISHED)
    try:
        with aside.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(content: bytes | Path | IO[bytes]) -> str:
    """Return the SHA-256 of bytes, or of a file, in hexadecimal digits."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            return sha256(file)
    digest = hashlib.sha256()
    if isinstance(content, bytes):
        digest.update(content)
    else:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def append_json_lines(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """Append lines to a file and create its folder if need be; NaN and infinity become null."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(map(_line, records))


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a file of JSON; an empty one if it is missing, unreadable or cut."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file, [] if it is missing; a line that was cut short is left out."""
    records: list[Any] = []
    with contextlib.suppress(FileNotFoundError):
        for line in Path(path).read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def write_json_lines(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a file by these records, atomically; its folder is created if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(map(_line, records)))


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed, so that pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def write_findings(
    folder: str | Path, name: str, content: dict[str, Any], draw: Callable[[Path], None]
) -> None:
    """Write `name`.json and, where matplotlib is installed, `name`.png into a folder.

    The folder is created if need be; numbers that are not finite become null. `draw` is called
    with the path of the picture.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.json", json.dumps(_without_nan(content), indent=1) + "\n")
    if has_matplotlib():
        draw(folder / f"{name}.png")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(_without_nan(record)) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
