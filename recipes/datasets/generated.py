"""Pictures of ten classes made on the spot: for trying things where no data set is at hand.

A picture is a wave whose direction and length are those of its class, shifted at random, under
noise. It is easy to learn and says nothing about accuracy on real pictures.
"""

import numpy as np

from datasets.pictures import LabelledPictures, PictureSets

_CLASSES = 10


def load(data_dir: str = "", *, size: int = 32, channels: int = 3, seed: int = 0) -> PictureSets:
    """Make 4096 training and 1024 test pictures.

    Args:
        data_dir: Not used; the data sets that are read have it.
        size: Rows and columns.
        channels: Colours.
        seed: The pictures depend on it, `size` and `channels` only.

    Returns:
        Training and test set, each class equally often to within one.
    """
    random = np.random.default_rng([seed, size, channels])
    return PictureSets(
        _make(4096, size, channels, random), _make(1024, size, channels, random), _CLASSES
    )


def _make(count: int, size: int, channels: int, random: np.random.Generator) -> LabelledPictures:
    labels = random.permutation(np.arange(count) % _CLASSES).astype(np.uint8)
    angle = np.pi * (labels % 5) / 5
    waves = np.where(labels < 5, 2.0, 4.0) * 2 * np.pi / size
    along: np.ndarray = np.arange(size, dtype=np.float32)
    phase = random.uniform(0, 2 * np.pi, count)
    x = (waves * np.cos(angle))[:, None, None] * along
    y = (waves * np.sin(angle))[:, None, None] * along[:, None]
    wave = np.sin(x + y + phase[:, None, None]).astype(np.float32)
    pictures: np.ndarray = np.empty((count, size, size, channels), np.uint8)
    for channel in range(channels):
        noise = random.standard_normal(wave.shape, np.float32)
        pictures[..., channel] = np.clip(127.5 + 60 * wave + 40 * noise, 0, 255)
    return LabelledPictures(pictures, labels)
