"""Fashion-MNIST: 60000 training and 10000 test pictures of 28x28 in ten classes.

Source: Xiao et al., "Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms", 2017.
"""

import fcntl
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from datasets.idx import read_idx

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
KERAS_CACHE_DIR = Path.home() / ".keras" / "datasets" / "fashion-mnist"
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class LabelledPictures(NamedTuple):
    """uint8 pictures (count, 28, 28, 1) and uint8 labels (count,) from 0 to 9."""

    pictures: np.ndarray
    labels: np.ndarray


def load(data_dir: str) -> tuple[LabelledPictures, LabelledPictures]:
    """Find Fashion-MNIST on this machine, or download it.

    Looks in `data_dir`, in its subfolder `fashion-mnist`, in Keras's cache and where Debian's
    package puts it, for the four IDX files, each packed with gzip or not; then lets Keras
    download it. Several processes may call it at once: one of a machine downloads.

    Args:
        data_dir: Folder to look in first; need not exist.

    Returns:
        Training and test set.

    Raises:
        FileNotFoundError: The files are nowhere and cannot be downloaded.
        ValueError: A file is damaged.
    """
    folders = (Path(data_dir), Path(data_dir) / "fashion-mnist", KERAS_CACHE_DIR, DEBIAN_DIR)
    for folder in folders:
        paths = [_find(folder, name) for name in _FILES]
        if all(paths):
            x, y, x_test, y_test = (read_idx(path) for path in paths if path)
            break
    else:
        (x, y), (x_test, y_test) = _download(folders)
    return LabelledPictures(x[..., None], y), LabelledPictures(x_test[..., None], y_test)


def _find(folder: Path, name: str) -> Path | None:
    """Return `name` or `name`.gz in `folder`, None where neither is."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _download(folders: tuple[Path, ...]) -> tuple:
    """Let Keras download into its cache; the other ranks of a machine wait for the first."""
    folders[0].mkdir(parents=True, exist_ok=True)
    with open(folders[0] / ".download-lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return keras.datasets.fashion_mnist.load_data()
        except Exception as error:  # Keras raises a bare Exception where a download fails.
            looked_in = ", ".join(str(folder) for folder in folders)
            raise FileNotFoundError(
                "Fashion-MNIST must be on this machine or reachable by download. "
                f"Received: no files {_FILES[0]}[.gz] and so on in {looked_in}; download: {error}. "
                "Put the four IDX files into --data-dir, or install Debian's package "
                "dataset-fashion-mnist, or run once on a machine with a network."
            ) from error
