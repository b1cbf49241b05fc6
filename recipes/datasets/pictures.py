"""Labelled pictures in memory, and how they become global batches."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfscale.data import GlobalBatches


class LabelledPictures(NamedTuple):
    """Pictures (count, rows, columns, channels), uint8, and their labels (count,), integers."""

    pictures: np.ndarray
    labels: np.ndarray

    def first(self, count: int) -> "LabelledPictures":
        """Return the first `count`; all of them for 0."""
        return LabelledPictures(self.pictures[: count or None], self.labels[: count or None])


class PictureSets(NamedTuple):
    """Training and test set of the same classes."""

    train: LabelledPictures
    test: LabelledPictures
    classes: int = 10


def augmented_batches(
    data: LabelledPictures, *, batch_size: int, seed: int, border: int = 4
) -> GlobalBatches:
    """Serve pictures shifted by up to `border` pixels, half of them mirrored.

    Other shifts each epoch, the same on any number of ranks. Pixels from outside are black.

    Args:
        data: The pictures; each rank holds all, as uint8.
        batch_size: Pictures of a step, all ranks together.
        seed: Of order and augmentation.
        border: Largest shift in pixels.

    Source: He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2.
    """
    pictures, labels = tf.constant(data.pictures), tf.constant(data.labels)
    shape = data.pictures.shape[1:]

    def augment(index: tf.Tensor, *, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        edge = [[border, border], [border, border], [0, 0]]
        picture = tf.image.stateless_random_crop(tf.pad(pictures[index], edge), shape, seed)
        return tf.image.stateless_random_flip_left_right(picture, seed + 1), labels[index]

    count = len(data.labels)
    return GlobalBatches.from_dataset(
        tf.data.Dataset.range(count),
        batch_size=batch_size,
        shuffle_buffer=count,  # indices only: the order is as random as that of arrays
        seed=seed,
        decode=augment,
    )
