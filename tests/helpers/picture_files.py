"""Data sets on disk, in the layout of the real ones, with pictures that a model can learn."""

import gzip
import pickle
from pathlib import Path

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """Return an array as an IDX file of unsigned bytes."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_idx_set(
    folder: Path, seed: int, *, train: int = 6, test: int = 3, pack: bool = True
) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        labels = np.random.default_rng([seed, count]).integers(0, 10, count)
        arrays[f"{part}-images-idx3-ubyte"] = striped(labels, 28, seed)
        arrays[f"{part}-labels-idx1-ubyte"] = labels
    for name, array in arrays.items():
        content = idx(array)
        path = folder / (f"{name}.gz" if pack else name)
        path.write_bytes(gzip.compress(content, 1) if pack else content)
    return arrays


def write_cifar10(folder: Path, seed: int, *, each: int = 4, binary: bool = False) -> np.ndarray:
    folder = folder / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    labels = np.random.default_rng(seed).integers(0, 10, (6, each))
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for own, name in zip(labels, names, strict=True):
        planes = np.repeat(striped(own, 32, seed)[:, None], 3, axis=1).reshape(each, -1)
        planes[:, 1024:2048] //= 2  # green is half of red, blue a quarter
        planes[:, 2048:] //= 4
        if binary:
            rows = np.concatenate([own[:, None].astype(np.uint8), planes], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            content = {b"data": planes, b"labels": own.tolist(), b"batch_label": b"a"}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return labels


def striped(labels: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Return uint8 pictures (count, size, size): stripes as wide as the label says, and noise."""
    random = np.random.default_rng([seed, size])
    columns = np.arange(size) // (labels[:, None] + 1) % 2 * 160
    pictures = np.repeat(columns[:, None, :], size, axis=1) + random.integers(
        0, 90, (len(labels), size, size)
    )
    return pictures.astype(np.uint8)
