"""ImageNet: 1.28 million training and 50000 validation pictures in a thousand classes.

Two layouts are read: `train/<class>/*` and `val/<class>/*` (or `validation/`), where the sorted
names of the folders in `train/` are the classes, and those in `val/` must be the same; or the
TFRecords `train-*-of-*` and `validation-*-of-*`. Folders whose names begin with a dot are no
classes. The folder may as well hold any other set of pictures that is laid out like this.

A picture is scaled until its shorter side has 256 pixels, cut to 224x224 (in training at a random
place, mirrored or not), and the mean colour is subtracted: [T] 4.4, without its preparation of
files. All of that is done in tf.data, in parallel and ahead of use, by the rank that trains on
the picture; the order is a shuffle of all pictures, the same on any number of ranks.

Source: Russakovsky et al., "ImageNet large scale visual recognition challenge", IJCV 2015.
"""

from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

import tfscale
from datasets import damaged_pictures, tfrecords
from datasets.rank_zero import on_first_rank
from tfscale.data import GlobalBatches

# Of the training set, red to blue, from 0 to 255: Simonyan and Zisserman, ICLR 2015.
MEAN = (123.68, 116.779, 103.939)
_SUFFIXES = {".jpeg", ".jpg", ".png", ".bmp"}
_VALIDATION = ("val", "validation")


class Files(NamedTuple):
    """Pictures in files: names, and labels from 0."""

    paths: list[str]
    labels: list[int]


class ImageNet(NamedTuple):
    """Training and validation data: float32 (batch, size, size, 3) and int labels (batch,)."""

    train: GlobalBatches
    valid: GlobalBatches
    classes: int


def load(data_dir: str, *, batch_size: int, seed: int, size: int = 224) -> ImageNet:
    """Open the data set; pictures are read when they are used.

    The first time, all pictures are decoded once to find damaged ones, which are left out.

    Collective: all ranks must call it.

    Args:
        data_dir: Folder with one of the two layouts.
        batch_size: Pictures of a step, all ranks together.
        seed: Of order, places and mirroring.
        size: Rows and columns to cut; the shorter side is scaled to 8/7 of it.

    Raises:
        FileNotFoundError: There is neither layout.
        ValueError: More than 1 % of the pictures are damaged, there is no class, or training and
            validation have different ones.
    """
    if on_first_rank(lambda: tfrecords.is_there(data_dir)):
        parts = [tfrecords.open_part(data_dir, part, decode) for part in tfrecords.PARTS]
        classes = 1000
    else:
        train, valid, classes = on_first_rank(lambda: _list_both(data_dir))
        parts = [_records(files, data_dir) for files in (train, valid)]
    (records, read), (valid_records, read_valid) = parts

    def train_picture(*record: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        picture, label = read(*record)
        return random_cut(picture, size, seed), label

    def valid_picture(*record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        picture, label = read_valid(*record)
        return middle_cut(picture, size), label

    count = int(records.cardinality())
    return ImageNet(
        GlobalBatches.from_dataset(
            records, batch_size=batch_size, seed=seed, decode=train_picture, shuffle_buffer=count
        ),
        GlobalBatches.from_dataset(
            valid_records,
            batch_size=max(1, batch_size // tfscale.size()) * tfscale.size(),
            decode=valid_picture,
            shuffle_buffer=0,
        ),
        classes,
    )


def decode(content: tf.Tensor) -> tf.Tensor:
    """Return a picture file as uint8 (rows, columns, 3), whatever its name says it is."""
    picture = tf.io.decode_image(content, channels=3, expand_animations=False)
    return tf.ensure_shape(picture, (None, None, 3))


def random_cut(picture: tf.Tensor, size: int, seed: tf.Tensor) -> tf.Tensor:
    """Return a square at a random place of the scaled picture, perhaps mirrored, less the mean."""
    scaled = _scaled(picture, size)
    cut = tf.image.stateless_random_crop(scaled, (size, size, 3), seed)
    return tf.image.stateless_random_flip_left_right(cut, seed + 1) - MEAN


def middle_cut(picture: tf.Tensor, size: int) -> tf.Tensor:
    """Return the square in the middle of the scaled picture, less the mean."""
    scaled = _scaled(picture, size)
    top, left = ((tf.shape(scaled)[axis] - size) // 2 for axis in (0, 1))
    return tf.ensure_shape(scaled[top : top + size, left : left + size], (size, size, 3)) - MEAN


def _scaled(picture: tf.Tensor, size: int) -> tf.Tensor:
    """Return float32 with a shorter side of 8/7 * size, as 256 is of 224."""
    shape = tf.cast(tf.shape(picture)[:2], tf.float64)
    shorter = round(size * 8 / 7)
    target = tf.maximum(
        tf.cast(tf.round(shape * (shorter / tf.reduce_min(shape))), tf.int32), shorter
    )
    return tf.image.resize(picture, target, antialias=True)


def _list_both(data_dir: str) -> tuple[Files, Files, int]:
    """Return the pictures of training and validation, and the number of classes."""
    folder = _find(data_dir, ("train",))
    classes = _classes(folder)
    train = _list(folder, classes)
    valid_folder = _find(data_dir, _VALIDATION)
    there = set(_classes(valid_folder))
    missing, further = sorted(set(classes) - there), sorted(there - set(classes))
    if missing or further:
        raise ValueError(
            f"{valid_folder} must have the folders of {folder}, whose places in the sorted list "
            f"are the labels. Received: {_first(missing)} missing, {_first(further)} besides. Add "
            "or remove folders."
        )
    return train, _list(valid_folder, classes), len(classes)


def _first(names: list[str]) -> str:
    """Return how many there are, and the first five."""
    return f"{len(names)} ({', '.join(names[:5])})" if names else "none"


def _find(data_dir: str, names: tuple[str, ...]) -> Path:
    """Return the first of some folders that is there."""
    for folder in (Path(data_dir) / name for name in names):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "ImageNet must have the folders train/<class>/ and val/<class>/, or the files "
        f"train-*-of-* and validation-*-of-*. Received: no {' or '.join(names)} in {data_dir}. "
        "Pass --data-dir."
    )


def _classes(folder: Path) -> list[str]:
    """Return the sorted names of the classes; what other programs hide beside them is none."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _list(folder: Path, classes: list[str]) -> Files:
    """Return the pictures of a folder; a label is the place of a class in the list."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        own = sorted(p for p in (folder / name).iterdir() if p.suffix.lower() in _SUFFIXES)
        paths += [str(path) for path in own]
        labels += [label] * len(own)
    if not paths:
        raise ValueError(
            f"Pictures must lie in a folder per class. Received: none in {folder}/<class>/. "
            "Sort them into folders named by their classes."
        )
    return Files(paths, labels)


def _records(files: Files, data_dir: str):
    """Return a dataset of (path, label) without damaged pictures, and how to read a record."""

    def read(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return decode(tf.io.read_file(path)), label

    stamp = on_first_rank(lambda: damaged_pictures.stamp_of([Path(path) for path in files.paths]))
    damaged = damaged_pictures.find(
        read, (files.paths, files.labels), stamp, str(Path(data_dir) / ".checked")
    )
    left = damaged_pictures.without([Path(path).name for path in files.paths], damaged)
    paths, labels = ([column[position] for position in left] for column in files)
    return tf.data.Dataset.from_tensor_slices((paths, labels)), read
