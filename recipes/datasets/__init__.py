"""Data sets of the papers, ready for `tfscale.data.GlobalBatches`.

Pictures in memory are uint8 from 0 to 255, as their files have them; models standardise them.
"""

from collections.abc import Callable

from datasets import cifar10, generated, hdf5, mnist
from datasets.pictures import PictureSets

_LOADERS: dict[str, Callable[[str], PictureSets]] = {
    "cifar10": cifar10.load,
    "fashion_mnist": mnist.load_fashion_mnist,
    "generated": generated.load,
    "mnist": mnist.load_mnist,
}
IN_MEMORY = tuple(_LOADERS)


def load(name: str, data_dir: str) -> PictureSets:
    """Load labelled pictures that fit into memory.

    Args:
        name: One of `IN_MEMORY`, or the path of an HDF5 file.
        data_dir: Folder to look in first; need not exist.

    Returns:
        Training and test set, the same on every rank.

    Raises:
        FileNotFoundError: The data set is nowhere, and the text says where to put it.
        ValueError: A file is damaged, or there is no data set of this name.
    """
    if name.endswith((".h5", ".hdf5")):
        return hdf5.load(name)
    if name not in _LOADERS:
        raise ValueError(
            f"--data must be one of {', '.join(IN_MEMORY)}, or an HDF5 file (.h5, .hdf5). "
            f"Received: {name}."
        )
    return _LOADERS[name](data_dir)
