"""The Phantom data set, and restoration pairs (corrupted, truth) made of it.

Pictures are random variants of the Shepp-Logan head phantom: sums of ten ellipses of constant grey
value. Every row of an ellipse is one interval, so a whole set is drawn by writing the two ends of
each interval into a difference array and summing along the rows: no loop over pictures, and 1600
pictures of 256x256 take a few seconds on one core.

[T] ch. 5 restores Phantom pictures without saying how they were corrupted. Here it is additive
white Gaussian noise with a standard deviation of 25 grey steps of 255, the middle one of the
usual levels of restoration papers: Zhang et al., "Beyond a Gaussian denoiser", IEEE TIP 2017,
and those [T] names, Mao et al., arXiv:1606.08921, among them. The truth has 8 bits. The
corrupted picture is neither clipped nor rounded: the noise is the same at every grey value, and
its PSNR is 20*log10(255/25) = 20.17 dB, or about 22.1 dB once limited to [0, 1] as `metrics.psnr`
does with every picture (half of the noise on black disappears).
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Grey value in tenths, centre x and y, half axes a and b, angle in degrees; the picture spans
# [-1, 1] in both directions. Geometry: Shepp and Logan, "The Fourier reconstruction of a head
# section", IEEE Trans. Nucl. Sci. 21 (1974), table 1; grey values: the higher-contrast ones of
# Toft, "The Radon transform" (1996), because the original ones differ by less than an 8-bit step.
SHEPP_LOGAN = np.array(
    [
        [10, 0.0, 0.0, 0.69, 0.92, 0.0],  # skull
        [-8, 0.0, -0.0184, 0.6624, 0.874, 0.0],  # brain
        [-2, 0.22, 0.0, 0.11, 0.31, -18.0],  # right ventricle
        [-2, -0.22, 0.0, 0.16, 0.41, 18.0],  # left ventricle
        [1, 0.0, 0.35, 0.21, 0.25, 0.0],
        [1, 0.0, 0.1, 0.046, 0.046, 0.0],
        [1, 0.0, -0.1, 0.046, 0.046, 0.0],
        [1, -0.08, -0.605, 0.046, 0.023, 0.0],
        [1, 0.0, -0.605, 0.023, 0.023, 0.0],
        [1, 0.06, -0.605, 0.023, 0.046, 0.0],
    ]
)
# Half-width of the uniform change of angle (degrees), and range of the two independent factors
# of the half axes. The brain's are narrow so that it stays inside the skull, as in a head.
_ANGLE_RANGE = np.array([20.0, 1.0] + [40.0] * 8)
_AXIS_RANGE = np.array([[0.80, 1.05], [0.95, 1.01]] + [[0.6, 1.4]] * 8)

_FORMAT_VERSION = 1  # Part of the cache file's name: raise it when the pictures change.
_CHUNK = 64  # Pictures drawn at once; bounds the working memory to tens of MB.

NOISE_LEVEL = 25.0 / 255.0
# Pictures of validation come from another stream than those of training with the same seed.
_VALIDATION_SEED_OFFSET = 1_000_000


def random_ellipses(count: int, *, seed: int = 0) -> np.ndarray:
    """Draw the ten ellipses of each picture.

    The skull's orientation and half axes are random, and the nine others sit in its frame:
    their centres turn and stretch with it. Then each of them is turned and each of its half
    axes is scaled at random, which changes its orientation, its shape and its size.

    Args:
        count: Number of pictures, 0 or more.
        seed: Any integer >= 0.

    Returns:
        float64 (count, 10, 6), columns as in `SHEPP_LOGAN`. The first n pictures are the same
        for every `count` >= n.

    Source: [T] ch. 5, "orientation, shape and size of each ellipse randomised".
    """
    uniform = np.random.default_rng(seed).random((count, len(SHEPP_LOGAN), 3))
    turn = np.deg2rad(_ANGLE_RANGE * (2.0 * uniform[..., 0] - 1.0))
    low, high = _AXIS_RANGE[:, :1], _AXIS_RANGE[:, 1:]
    factor = low + (high - low) * uniform[..., 1:]

    ellipses = np.tile(SHEPP_LOGAN, (count, 1, 1))
    head_turn, head_factor = turn[:, :1], factor[:, :1]
    x, y = np.moveaxis(ellipses[..., 1:3] * head_factor, -1, 0)
    ellipses[..., 1] = np.cos(head_turn) * x - np.sin(head_turn) * y
    ellipses[..., 2] = np.sin(head_turn) * x + np.cos(head_turn) * y
    ellipses[:, 0, 3:5] *= factor[:, 0]
    ellipses[:, 1:, 3:5] *= factor[:, 1:] * head_factor
    ellipses[:, 0, 5] += np.rad2deg(turn[:, 0])
    ellipses[:, 1:, 5] += np.rad2deg(turn[:, 1:] + head_turn)
    return ellipses


def draw_ellipses(ellipses: np.ndarray, size: int = 256) -> np.ndarray:
    """Draw pictures; a pixel belongs to an ellipse if its centre does.

    Args:
        ellipses: (count, n, 6), columns as in `SHEPP_LOGAN`, any n.
        size: Rows and columns of a picture, 1 or more.

    Returns:
        uint8 (count, size, size): the sum of the grey values, limited to [0, 1], times 255.
        The first row is the top (largest y).
    """
    pictures: np.ndarray = np.empty((len(ellipses), size, size), np.uint8)
    grey_of_tenths = np.round(np.arange(11) * 25.5).astype(np.uint8)
    for start in range(0, len(ellipses), _CHUNK):
        tenths = _sum_of_intervals(ellipses[start : start + _CHUNK], size)
        pictures[start : start + _CHUNK] = grey_of_tenths[np.clip(tenths, 0, 10)]
    return pictures


def _sum_of_intervals(ellipses: np.ndarray, size: int) -> np.ndarray:
    """Return int16 (count, size, size): the sum of the grey values in tenths, not limited.

    An ellipse with half axes a, b and angle t has the half height h, h^2 = a^2 sin^2 t +
    b^2 cos^2 t. In the row at height v above its centre it covers a*b*sqrt(h^2 - v^2)/h^2 to
    both sides of the middle, which lies v*(a^2 - b^2)*sin t*cos t/h^2 beside the centre.
    """
    grey, x0, y0, a, b, degrees = (c[..., None] for c in np.moveaxis(ellipses, -1, 0))
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    centres = (2.0 * np.arange(size) + 1.0) / size - 1.0
    v = -centres - y0  # (count, n, rows): height above the ellipse's centre, top row first
    half_height_squared = (a * sin) ** 2 + (b * cos) ** 2
    inside = half_height_squared - v**2
    middle = x0 + v * (a**2 - b**2) * sin * cos / half_height_squared
    half_width = a * b * np.sqrt(np.maximum(inside, 0.0)) / half_height_squared
    # Pixel j has its centre at (2j+1)/size - 1; the interval covers pixels first <= j < end.
    first = np.ceil(((middle - half_width + 1.0) * size - 1.0) / 2.0)
    end = np.floor(((middle + half_width + 1.0) * size - 1.0) / 2.0) + 1.0
    first, end = (np.clip(edge, 0, size).astype(np.intp) for edge in (first, end))
    covered = (inside >= 0.0) & (first < end)

    count, _, rows = covered.shape
    line = np.arange(count)[:, None, None] * rows + np.arange(rows)
    steps = np.zeros((count * rows, size + 1), np.int16)
    values = np.broadcast_to(grey, covered.shape)[covered].astype(np.int16)
    line = np.broadcast_to(line, covered.shape)[covered]
    np.add.at(steps, (line, first[covered]), values)
    np.add.at(steps, (line, end[covered]), -values)
    return np.cumsum(steps[:, :size], axis=1, dtype=np.int16).reshape(count, rows, size)


def phantoms(count: int, *, size: int = 256, seed: int = 0) -> np.ndarray:
    """Make the Phantom data set.

    Args:
        count: Number of pictures, 0 or more.
        size: Rows and columns of a picture, 1 or more.
        seed: Any integer >= 0; the pictures depend on it and on `size` only.

    Returns:
        uint8 (count, size, size); grey value 1.0 is 255. The first n pictures are the same for
        every `count` >= n.

    Raises:
        ValueError: An argument is out of range.
    """
    for name, value, least in (("count", count, 0), ("size", size, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}. Received: {name}={value}.")
    return draw_ellipses(random_ellipses(count, seed=seed), size)


def load_phantoms(
    count: int, *, size: int = 256, seed: int = 0, cache_dir: str | os.PathLike[str]
) -> np.ndarray:
    """Return `phantoms(count, size=size, seed=seed)`, kept in a file from the first call on.

    Any number of processes may call it at once: each writes a file of its own and renames it,
    so a reader sees a whole file or none. A damaged file is made again.

    Args:
        count: Number of pictures, 0 or more.
        size: Rows and columns of a picture.
        seed: Any integer >= 0.
        cache_dir: Folder, made if it is missing; a `.gitignore` in it keeps it out of git.

    Returns:
        uint8 (count, size, size).

    Raises:
        ValueError: An argument is out of range.
        OSError: `cache_dir` cannot be written.
    """
    path = Path(cache_dir) / f"phantom-v{_FORMAT_VERSION}-{count}x{size}x{size}-seed{seed}.npz"
    pictures = _read_cache(path, (count, size, size))
    if pictures is None:
        pictures = phantoms(count, size=size, seed=seed)
        _write_cache(path, pictures)
    return pictures


def _read_cache(path: Path, shape: tuple[int, int, int]) -> np.ndarray | None:
    """Return the pictures in `path`, or None where there is no sound file."""
    try:
        with np.load(path) as archive:
            pictures: np.ndarray = archive["pictures"]
    except Exception:  # a damaged file ends with any of a dozen: make it again
        return None
    return pictures if pictures.shape == shape and pictures.dtype == np.uint8 else None


def _write_cache(path: Path, pictures: np.ndarray) -> None:
    """Write `pictures` to `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    temporary = path.with_name(f".{path.stem}-{os.uname().nodename}-{os.getpid()}.npz")
    try:
        np.savez_compressed(temporary, pictures=pictures)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
