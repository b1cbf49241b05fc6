"""The dynamic section of a shared library: its own name and the libraries that it needs."""

from __future__ import annotations

import struct
from pathlib import Path

_LOAD, _DYNAMIC = 1, 2  # kinds of segments
_STRINGS = 5  # the entry that gives the address of the names
_ENTRIES = {1: "NEEDED", 14: "SONAME", 15: "RUNPATH", 29: "RUNPATH"}  # 15 is the older RPATH


def read_dynamic(path: str | Path) -> dict[str, list[str]]:
    """Return the names of a 64-bit, little-endian ELF file by "NEEDED", "SONAME" and "RUNPATH".

    Raises:
        OSError: The file cannot be read, or is of another form.
    """
    data = Path(path).read_bytes()
    names: dict[str, list[str]] = {name: [] for name in _ENTRIES.values()}
    if data[:6] != b"\x7fELF\x02\x01":
        raise OSError(f"{path} is not a 64-bit, little-endian ELF file.")
    try:
        (table,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        # Of each segment: kind, flags, offset in the file, address, _, bytes in the file.
        segments = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
        ((_, _, start, _, _, length),) = (part for part in segments if part[0] == _DYNAMIC)
        entries = list(struct.iter_unpack("<qQ", data[start : start + length]))
        address = dict(entries)[_STRINGS]
        strings = next(
            address - begin + offset
            for kind, _, offset, begin, _, n_bytes in segments
            if kind == _LOAD and begin <= address < begin + n_bytes
        )
    except (struct.error, ValueError, KeyError, StopIteration) as error:
        raise OSError(f"{path} has no readable dynamic section.") from error
    for tag, value in entries:
        if tag in _ENTRIES:
            name = data[strings + value : data.index(b"\0", strings + value)]
            names[_ENTRIES[tag]].append(name.decode(errors="replace"))
    return names
