"""ImageNet as TFRecords, read at random: each rank reads its own pictures only.

The files are those that TensorFlow's script for ImageNet makes: `train-00000-of-01024` and so
on; a record has `image/encoded`, and `image/class/label` from 1 (0 is "background").

A TFRecord is a length (8 bytes), its checksum (4), the content, and its checksum (4). One pass
over the lengths tells where every record is, so that all records can be shuffled without reading
them. Checksums are not compared: a picture that can be decoded counts as sound.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from datasets import damaged_pictures
from datasets.rank_zero import on_first_rank

PARTS = ("train", "validation")
_HEAD_BYTES, _TAIL_BYTES = 12, 4
_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


class Index(NamedTuple):
    """Places of records: number of the file, first byte and length of the content."""

    paths: list[str]
    files: list[int]
    offsets: list[int]
    lengths: list[int]
    lost: int  # records after the place where a file is broken, estimated by their bytes


def is_there(data_dir: str) -> bool:
    """Whether the folder holds the TFRecords of both parts."""
    return all(any(Path(data_dir).glob(f"{part}-*-of-*")) for part in PARTS)


def index(paths: list[Path]) -> Index:
    """Find the records of some files."""
    files, offsets, lengths, bytes_lost = [], [], [], 0
    for number, path in enumerate(paths):
        end = os.path.getsize(path)
        with open(path, "rb") as file:
            begin = 0
            while begin < end:
                file.seek(begin)
                head = file.read(_HEAD_BYTES)
                length = struct.unpack("<Q", head[:8])[0] if len(head) == _HEAD_BYTES else end
                following = begin + _HEAD_BYTES + length + _TAIL_BYTES
                if following > end:
                    bytes_lost += end - begin
                    break
                files.append(number)
                offsets.append(begin + _HEAD_BYTES)
                lengths.append(length)
                begin = following
    frames = sum(lengths) + len(lengths) * (_HEAD_BYTES + _TAIL_BYTES)
    lost = (
        max(bool(bytes_lost), round(bytes_lost * len(lengths) / frames)) if lengths else bytes_lost
    )
    return Index([str(path) for path in paths], files, offsets, lengths, lost)


def open_part(data_dir: str, part: str, decode: Callable) -> tuple[tf.data.Dataset, Callable]:
    """Open the training or the validation set.

    Collective: all ranks must call it.

    Args:
        data_dir: Folder of the files.
        part: One of `PARTS`.
        decode: From the content of a picture file to the picture.

    Returns:
        A dataset of records, and the function that reads one: picture and label from 0.

    Raises:
        ValueError: More than 1 % of the pictures are damaged or lost.
    """
    paths = on_first_rank(lambda: sorted(Path(data_dir).glob(f"{part}-*-of-*")))
    found = on_first_rank(lambda: index(paths))
    names = tf.constant(found.paths)

    def read(file: tf.Tensor, offset: tf.Tensor, length: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        content = tf.numpy_function(_read, [names[file], offset, length], tf.string)
        example = tf.io.parse_single_example(tf.ensure_shape(content, ()), _FEATURES)
        return decode(example["image/encoded"]), example["image/class/label"] - 1

    columns = (found.files, found.offsets, found.lengths)
    stamp = on_first_rank(lambda: damaged_pictures.stamp_of(paths))
    damaged = damaged_pictures.find(read, columns, stamp, str(Path(data_dir) / ".checked"))
    records = [f"{Path(found.paths[f]).name} byte {o}" for f, o in zip(*columns[:2], strict=True)]
    left = damaged_pictures.without(records, damaged, found.lost)
    kept = tuple(np.array(column, np.int64)[left] for column in columns)
    return tf.data.Dataset.from_tensor_slices(kept), read


def _read(path: bytes, offset: np.int64, length: np.int64) -> bytes:
    with open(path, "rb") as file:
        file.seek(int(offset))
        return file.read(int(length))
