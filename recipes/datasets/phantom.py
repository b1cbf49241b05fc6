"""Restoration pairs (corrupted, truth) made of the Phantom data set.

[T] ch. 5 restores Phantom pictures without saying how they were corrupted. Here it is additive
white Gaussian noise with a standard deviation of 25 grey steps of 255, the middle one of the
usual levels of restoration papers: Zhang et al., "Beyond a Gaussian denoiser", IEEE TIP 2017,
and those [T] names, Mao et al., arXiv:1606.08921, among them. The truth has 8 bits. The
corrupted picture is neither clipped nor rounded: the noise is the same at every grey value, and
its PSNR is 20*log10(255/25) = 20.17 dB, or about 22.1 dB once limited to [0, 1] as `metrics.psnr`
does with every picture (half of the noise on black disappears).
"""

from typing import NamedTuple

import numpy as np

from tfscale.data.phantom import load_phantoms

NOISE_LEVEL = 25.0 / 255.0
# Pictures of validation come from another stream than those of training with the same seed.
_VALIDATION_SEED_OFFSET = 1_000_000


class Pairs(NamedTuple):
    """Corrupted pictures and their truth, float32 (count, rows, columns, 1); truth in [0, 1]."""

    corrupted: np.ndarray
    truth: np.ndarray


def load(
    images: int, patches_per_image: int, validation_images: int, *, seed: int, cache_dir: str
) -> tuple[Pairs, Pairs]:
    """Make the training patches and the validation pictures.

    Every rank that calls this with the same arguments gets the same arrays.

    Args:
        images: Pictures of 256x256 from which the training patches are cut.
        patches_per_image: Patches of 32x32 cut from each, at random places.
        validation_images: Whole pictures of 256x256, none of them in the training set.
        seed: Integer from 0 to 999999.
        cache_dir: Folder in which the pictures are kept between runs.

    Returns:
        Training pairs (images * patches_per_image, 32, 32, 1) and validation pairs
        (validation_images, 256, 256, 1).
    """
    train_pictures = load_phantoms(images, seed=seed, cache_dir=cache_dir)
    valid_seed = seed + _VALIDATION_SEED_OFFSET
    valid_pictures = load_phantoms(validation_images, seed=valid_seed, cache_dir=cache_dir)
    patches = cut_patches(train_pictures, patches_per_image, seed=seed)
    return corrupt(patches, seed=seed), corrupt(valid_pictures, seed=valid_seed)


def cut_patches(
    pictures: np.ndarray, patches_per_image: int, *, seed: int, size: int = 32
) -> np.ndarray:
    """Cut squares at uniformly random places.

    Args:
        pictures: (count, rows, columns), at least `size` in both.
        patches_per_image: Patches of each picture, 0 or more.
        seed: Any integer >= 0.
        size: Rows and columns of a patch.

    Returns:
        (count * patches_per_image, size, size), same dtype; the patches of a picture follow
        each other.
    """
    count, rows, columns = pictures.shape
    random = np.random.default_rng([seed, 1])
    top = random.integers(0, rows - size + 1, (count, patches_per_image))
    left = random.integers(0, columns - size + 1, (count, patches_per_image))
    windows = np.lib.stride_tricks.sliding_window_view(pictures, (size, size), axis=(1, 2))
    patches = windows[np.arange(count)[:, None], top, left]
    return patches.reshape(count * patches_per_image, size, size)


def corrupt(pictures: np.ndarray, *, seed: int, noise_level: float = NOISE_LEVEL) -> Pairs:
    """Add white Gaussian noise, neither clipped nor rounded.

    Args:
        pictures: uint8 (count, rows, columns).
        seed: Any integer >= 0.
        noise_level: Standard deviation, where the grey values are in [0, 1].

    Returns:
        float32 pairs (count, rows, columns, 1).
    """
    truth = pictures[..., None].astype(np.float32) / np.float32(255.0)
    noise = np.random.default_rng([seed, 2]).standard_normal(truth.shape, np.float32)
    return Pairs(truth + np.float32(noise_level) * noise, truth)
