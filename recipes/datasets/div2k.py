"""DIV2K: 800 training and 100 validation pictures of about 2040x1404 for super-resolution.

The folder holds `DIV2K_train_HR` and `DIV2K_valid_HR`, as published. Small pictures are read from
`DIV2K_train_LR_bicubic/X2/0001x2.png` and so on where these are there too; otherwise they are
made: bicubic, with the filter widened by the scale, rounded to 8 bits, as the published ones
are. Training takes a random square of each picture, turned and mirrored at random.

Every square costs the decoding of whole pictures, some 0.1 s of a core each; tf.data decodes in
parallel and ahead, on the rank that trains on the square. `squares_per_image` lets an epoch pass
over each picture more than once.

Source: Agustsson and Timofte, "NTIRE 2017 challenge on single image super-resolution", CVPR
workshops 2017; squares and their augmentation: Lim et al., "Enhanced deep residual networks",
the same volume, section 4.2.
"""

from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

import tfscale
from datasets import damaged_pictures
from datasets.rank_zero import on_first_rank
from tfscale.data import GlobalBatches

# Of the training set, red to blue, in [0, 1]: what the authors of EDSR subtract.
MEAN = (0.4488, 0.4371, 0.4040)
_MARGIN = 4  # Small pixels around a square that the bicubic filter may look at; it needs 2.


class Div2k(NamedTuple):
    """Pairs (small, large), float32 in [0, 1]: squares for training, whole pictures to validate."""

    train: GlobalBatches
    valid: GlobalBatches


class Pairs(NamedTuple):
    """File names of large pictures and of their small ones; "" where that must be made."""

    large: list[str]
    small: list[str]


def load(
    data_dir: str,
    scale: int,
    *,
    batch_size: int,
    seed: int,
    size: int = 48,
    squares_per_image: int = 1,
) -> Div2k:
    """Open the data set; pictures are read when they are used.

    The first time, all pictures are decoded once to find damaged ones, which are left out.

    Collective: all ranks must call it.

    Args:
        data_dir: Folder that holds `DIV2K_train_HR`, or a subfolder `DIV2K` that does.
        scale: 2, 3 or 4.
        batch_size: Squares of a step, all ranks together.
        seed: Of order, places and turns.
        size: Rows and columns of the small square.
        squares_per_image: Squares of each picture in an epoch.

    Raises:
        FileNotFoundError: A folder is missing.
        ValueError: More than 1 % of the pictures are damaged.
    """
    train, valid = (_sound(data_dir, part, scale) for part in ("train", "valid"))

    def square(large: tf.Tensor, small: tf.Tensor, *, seed: tf.Tensor) -> tuple:
        return random_square(_decode(large), small, scale, size, seed)

    def whole(large: tf.Tensor, small: tf.Tensor) -> tuple:
        picture = cut_to_multiple(_decode(large), scale)
        is_made = tf.equal(small, "")
        little = tf.cond(is_made, lambda: shrink(picture, scale), lambda: _decode(small))
        return _unit(little), _unit(picture)

    count = len(train.large) * squares_per_image
    records = tf.data.Dataset.from_tensor_slices(tuple(train)).repeat(squares_per_image)
    return Div2k(
        GlobalBatches.from_dataset(
            records, batch_size=batch_size, seed=seed, decode=square, shuffle_buffer=count
        ),
        GlobalBatches.from_dataset(  # Pictures differ in size: one per rank and step.
            tf.data.Dataset.from_tensor_slices(tuple(valid)),
            batch_size=tfscale.size(),
            decode=whole,
            shuffle_buffer=0,
        ),
    )


def random_square(
    picture: tf.Tensor, small_path: tf.Tensor, scale: int, size: int, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a square of the small picture and that of the large one, turned alike.

    Args:
        picture: uint8, the large picture.
        small_path: File of the small one; "" to make it.
        scale: 2, 3 or 4.
        size: Rows and columns of the small square.
        seed: int64 (2,).

    Returns:
        float32 (size, size, 3) and (scale*size, scale*size, 3), in [0, 1].
    """
    picture = cut_to_multiple(picture, scale)
    room = tf.shape(picture)[:2] // scale - size + 1
    draws = tf.random.stateless_uniform([4], seed)
    top, left = tf.unstack(tf.cast(draws[:2] * tf.cast(room, tf.float32), tf.int32))
    large = picture[top * scale : (top + size) * scale, left * scale : (left + size) * scale]

    def made() -> tf.Tensor:
        return shrunken_square(picture, top, left, scale, size)

    def read() -> tf.Tensor:
        return _decode(small_path)[top : top + size, left : left + size]

    small = tf.cond(tf.equal(small_path, ""), made, read)
    turns, is_mirrored = tf.cast(draws[2] * 4, tf.int32), draws[3] < 0.5
    sides = (size, size * scale)
    both = []
    for part, side in zip((small, large), sides, strict=True):
        turned = tf.image.rot90(tf.ensure_shape(part, (side, side, 3)), turns)
        both.append(_unit(tf.cond(is_mirrored, lambda p=turned: p[:, ::-1], lambda p=turned: p)))
    return both[0], both[1]


def shrunken_square(
    picture: tf.Tensor, top: tf.Tensor, left: tf.Tensor, scale: int, size: int
) -> tf.Tensor:
    """Return a square of the shrunken picture without shrinking all of it.

    It equals `shrink(picture, scale)[top : top + size, left : left + size]`.
    """
    rows, columns = tf.unstack(tf.shape(picture)[:2] // scale)
    top_0, left_0 = tf.maximum(top - _MARGIN, 0), tf.maximum(left - _MARGIN, 0)
    bottom = tf.minimum(top + size + _MARGIN, rows)
    right = tf.minimum(left + size + _MARGIN, columns)
    around = picture[top_0 * scale : bottom * scale, left_0 * scale : right * scale]
    return shrink(around, scale)[
        top - top_0 : top - top_0 + size, left - left_0 : left - left_0 + size
    ]


def shrink(picture: tf.Tensor, scale: int) -> tf.Tensor:
    """Return a uint8 picture with `scale` times fewer rows and columns, by bicubic weights."""
    shape = tf.shape(picture)[:2] // scale
    small = tf.image.resize(picture, shape, "bicubic", antialias=True)
    return tf.saturate_cast(tf.round(small), tf.uint8)


def cut_to_multiple(picture: tf.Tensor, scale: int) -> tf.Tensor:
    """Leave out the last rows and columns that are no multiple of `scale`."""
    shape = tf.shape(picture)[:2] // scale * scale
    return picture[: shape[0], : shape[1]]


def _unit(picture: tf.Tensor) -> tf.Tensor:
    return tf.cast(picture, tf.float32) / 255.0


def _decode(path: tf.Tensor) -> tf.Tensor:
    picture = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
    return tf.ensure_shape(picture, (None, None, 3))


def _sound(data_dir: str, part: str, scale: int) -> Pairs:
    """Return the pairs of a part whose files can be decoded and fit each other."""
    pairs = on_first_rank(lambda: _list(data_dir, part, scale))
    names = [Path(name) for column in pairs for name in column if name]
    stamp = on_first_rank(lambda: damaged_pictures.stamp_of(names))

    def read(large: tf.Tensor, small: tf.Tensor) -> tf.Tensor:
        picture = cut_to_multiple(_decode(large), scale)
        shape = tf.shape(picture)[:2] // scale
        found = tf.cond(tf.equal(small, ""), lambda: shape, lambda: tf.shape(_decode(small))[:2])
        with tf.control_dependencies([tf.debugging.assert_equal(found, shape)]):
            return tf.identity(picture)

    damaged = damaged_pictures.find(read, tuple(pairs), stamp, str(Path(data_dir) / ".checked"))
    left = damaged_pictures.without([Path(name).name for name in pairs.large], damaged)
    return Pairs(*([column[position] for position in left] for column in pairs))


def _list(data_dir: str, part: str, scale: int) -> Pairs:
    """Return the names of a part's pictures."""
    for root in (Path(data_dir), Path(data_dir) / "DIV2K"):
        folder = root / f"DIV2K_{part}_HR"
        large = sorted(folder.glob("*.png"))
        if large:
            break
    else:
        raise FileNotFoundError(
            f"DIV2K must have PNG files in DIV2K_{part}_HR. Received: none in {data_dir}. Unpack "
            f"DIV2K_{part}_HR.zip in --data-dir."
        )
    shrunken = root / f"DIV2K_{part}_LR_bicubic" / f"X{scale}"
    small = [shrunken / f"{path.stem}x{scale}.png" for path in large]
    has_small = shrunken.is_dir()
    return Pairs([str(path) for path in large], [str(path) if has_small else "" for path in small])
