"""Atomic writes, digests, files of JSON lines and of findings."""

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
    """Write a file under another name, force it to the disk and rename it.

    A process that is killed leaves the file that was there before, or none.

    Args:
        path: Where it appears, complete; its folder exists.
        content: The bytes, text, or a function that is given the open file.
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
    """Force the names in a folder to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(content: bytes | Path) -> str:
    """Return the SHA-256 of bytes, or of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with content.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def append_json_lines(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """Add lines to a file, in a folder that is made if need be; NaN and infinity become null."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(map(_line, records))


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file: none if it is missing, without a line that was cut short."""
    records: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records


def write_json_lines(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a file by these records, atomically; its folder is made if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(map(_line, records)))


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def write_findings(
    folder: str | Path, name: str, content: dict[str, Any], draw: Callable[[Path], None]
) -> None:
    """Write `name`.json into a folder, which is made, and `name`.png if it can be drawn.

    Args:
        folder: Where.
        name: Of both files.
        content: JSON. Numbers that are not finite become null.
        draw: Called with the path of the picture.
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
