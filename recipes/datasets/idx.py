"""Read the IDX files in which MNIST and its relatives are published."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

_UNSIGNED_BYTE = 8


def read_idx(path: Path) -> np.ndarray:
    """Read one IDX file of unsigned bytes.

    Args:
        path: The file; unpacked with gzip if its name ends in `.gz`.

    Returns:
        uint8 array with the dimensions the file states.

    Raises:
        ValueError: The file is damaged or holds another type.
        OSError: It cannot be read.

    Source: "The IDX file format" on the page of the MNIST database: two zero bytes, type,
        number of dimensions, then each dimension as a big-endian 32-bit integer.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(_damaged(path, str(error))) from error
    if len(content) < 4 or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
        raise ValueError(_damaged(path, f"it starts with {content[:4].hex(' ')}"))
    header_bytes = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:header_bytes], ">u4"))
    if len(shape) < content[3] or len(content) - header_bytes != math.prod(shape):
        raise ValueError(_damaged(path, f"shape {shape}, {len(content) - header_bytes} bytes"))
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _damaged(path: Path, found: str) -> str:
    return (
        "An IDX file must state unsigned bytes and hold as many as its shape says. "
        f"Received: {path}: {found}. Delete the file and get it again."
    )
