"""Labelled pictures in one HDF5 file, laid out as in [F].

The file has `train/images`, `train/labels`, `test/images` and `test/labels`. Images are (count,
channels, rows, columns), as PyTorch has them, or (count, rows, columns, channels); uint8, or
floats in [0, 1] or [-1, 1]. The attribute `classes` of `train/labels` names the classes.
"""

from pathlib import Path

import h5py
import numpy as np

from datasets.pictures import LabelledPictures, PictureSets

_MAX_CHANNELS = 4


def load(path: str) -> PictureSets:
    """Read the file.

    Args:
        path: The HDF5 file; each rank reads it by itself.

    Returns:
        Training and test set. Floats become uint8: they were made of 8 bits.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no HDF5 file, or lacks something.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--data must name an HDF5 file that exists. Received: {path}.")
    try:
        with h5py.File(path, "r") as file:
            train, test = (_read(file, part) for part in ("train", "test"))
            named = file["train/labels"].attrs.get("classes", ())
    except (OSError, KeyError) as error:
        raise ValueError(
            "An HDF5 file must have the datasets train/images, train/labels, test/images and "
            f"test/labels. Received: {path}: {error}. Make it with `write`."
        ) from error
    return PictureSets(train, test, len(named) or int(train.labels.max()) + 1)


def write(path: str, sets: PictureSets, classes: list[str]) -> None:
    """Write a file in the layout of [F]: floats in [0, 1], channels first.

    Args:
        path: File to write; replaced if it exists.
        sets: What to write.
        classes: Name of each class.

    Source: [F] "Implementation" (data sets are converted to HDF5).
    """
    with h5py.File(path, "w") as file:
        for name, part in (("train", sets.train), ("test", sets.test)):
            images = np.moveaxis(part.pictures, -1, 1).astype(np.float32) / 255
            file.create_dataset(f"{name}/images", data=images)
            labels = file.create_dataset(f"{name}/labels", data=part.labels.astype(np.int64))
            labels.attrs["classes"] = classes


def _read(file: h5py.File, part: str) -> LabelledPictures:
    images, labels = file[f"{part}/images"][...], file[f"{part}/labels"][...]
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise KeyError(f"{part}: images {images.shape}, labels {labels.shape}")
    if images.shape[1] <= _MAX_CHANNELS < images.shape[-1]:
        images = np.moveaxis(images, 1, -1)
    if images.dtype != np.uint8:
        low = -1.0 if images.min() < 0 else 0.0
        images = np.round((images - low) / (1.0 - low) * 255).clip(0, 255).astype(np.uint8)
    return LabelledPictures(np.ascontiguousarray(images), labels.astype(np.int32))
