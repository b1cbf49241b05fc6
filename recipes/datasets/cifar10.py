"""CIFAR-10: 50000 training and 10000 test pictures of 32x32 in three colours and ten classes.

Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np

from datasets.download import by_keras
from datasets.pictures import LabelledPictures, PictureSets

_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_PICTURE_BYTES = 3 * 32 * 32
# What the published files name; nothing else of a file is run.
_PICKLED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def load(data_dir: str) -> PictureSets:
    """Find CIFAR-10 on this machine, or download it.

    Looks for the published files, as unpacked (`cifar-10-batches-py`, or the binary version
    `cifar-10-batches-bin`), in `data_dir`; then lets Keras look into its cache or download.

    Args:
        data_dir: Folder to look in first; need not exist.

    Raises:
        FileNotFoundError: The files are nowhere and cannot be downloaded.
        ValueError: A file is damaged.
    """
    for folder, suffix, read in (
        ("cifar-10-batches-py", "", _read_pickle),
        ("cifar-10-batches-bin", ".bin", _read_binary),
    ):
        for place in (Path(data_dir) / folder, Path(data_dir)):
            if (place / f"{_TEST[0]}{suffix}").is_file():
                train, test = (
                    _joined([read(place / f"{name}{suffix}") for name in names])
                    for names in (_TRAIN, _TEST)
                )
                return PictureSets(train, test)
    missing = (
        "CIFAR-10 must be on this machine or reachable by download; unpack "
        "cifar-10-python.tar.gz in --data-dir. Received: no folder cifar-10-batches-py or "
        f"cifar-10-batches-bin in {data_dir}."
    )
    (x, y), (x_test, y_test) = by_keras(keras.datasets.cifar10.load_data, data_dir, missing)
    return PictureSets(LabelledPictures(x, y[:, 0]), LabelledPictures(x_test, y_test[:, 0]))


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> LabelledPictures:
    planes = np.concatenate([pictures for pictures, _ in parts])
    pictures = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return LabelledPictures(np.ascontiguousarray(pictures), np.concatenate([y for _, y in parts]))


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _read_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with open(path, "rb") as file:
            content = _DataOnly(file, encoding="bytes").load()
        pictures, labels = content[b"data"], np.array(content[b"labels"], np.uint8)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(_damaged(path, str(error) or type(error).__name__)) from error
    return _checked(path, pictures, labels)


def _read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % (1 + _PICTURE_BYTES):
        raise ValueError(_damaged(path, f"{len(content)} bytes"))
    rows = content.reshape(-1, 1 + _PICTURE_BYTES)
    return _checked(path, rows[:, 1:], rows[:, 0])


def _checked(path: Path, pictures: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if pictures.shape != (len(labels), _PICTURE_BYTES) or pictures.dtype != np.uint8:
        raise ValueError(_damaged(path, f"{len(labels)} labels, pictures {pictures.shape}"))
    if len(labels) and labels.max() > 9:
        raise ValueError(_damaged(path, f"a label {labels.max()}"))
    return pictures, labels


def _damaged(path: Path, found: str) -> str:
    return (
        f"A CIFAR-10 file must hold pictures of {_PICTURE_BYTES} bytes with labels from 0 to 9. "
        f"Received: {path}: {found}. Delete the file and get it again."
    )
