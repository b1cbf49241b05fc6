"""DIV2K: squares for training, whole pictures for validation, small ones made or read."""

import numpy as np
import pytest
import tensorflow as tf
from datasets import div2k
from PIL import Image

from tests.helpers.single_job import single_job  # noqa: F401

pytestmark = pytest.mark.slow

SIZE = 8


def _noise(rows, columns, seed):
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), np.uint8)


def _write(folder, scale, *, count=12, small=True):
    for part, numbers in (("train", range(1, count + 1)), ("valid", range(801, 804))):
        large = folder / f"DIV2K_{part}_HR"
        shrunken = folder / f"DIV2K_{part}_LR_bicubic" / f"X{scale}"
        for path in (large, shrunken) if small else (large,):
            path.mkdir(parents=True)
        for number in numbers:
            picture = _noise(12 * scale + number % 3, 15 * scale, number)
            Image.fromarray(picture).save(large / f"{number:04d}.png")
            if small:
                little = div2k.shrink(div2k.cut_to_multiple(picture, scale), scale).numpy()
                Image.fromarray(little).save(shrunken / f"{number:04d}x{scale}.png")
    return folder


def _load(folder, scale=2, batch_size=4, **options):
    return div2k.load(str(folder), scale, batch_size=batch_size, seed=3, size=SIZE, **options)


def test_squares_and_whole_pictures_are_the_same_whether_made_or_read(tmp_path):
    scale = 3  # of pictures whose rows are no multiple of it
    read = _load(_write(tmp_path / "read", scale), scale)
    made = _load(_write(tmp_path / "made", scale, small=False), scale)
    assert read.train.samples == 12 and read.valid.samples == 3
    assert _load(tmp_path / "read", scale, squares_per_image=3).train.samples == 36
    for (x, y), (x_made, y_made) in zip(read.train, made.train, strict=True):
        assert x.shape == (4, SIZE, SIZE, 3) and y.shape == (4, scale * SIZE, scale * SIZE, 3)
        assert x.dtype == y.dtype == tf.float32
        assert np.min(x) >= 0 and np.max(y) <= 1
        np.testing.assert_array_equal(y, y_made)
        np.testing.assert_allclose(x, x_made, atol=1.01 / 255)  # halves may round differently
    for (x, y), (x_made, y_made) in zip(read.valid, made.valid, strict=True):
        assert y.shape[1:] == (x.shape[1] * scale, x.shape[2] * scale, 3)
        np.testing.assert_array_equal(y, y_made)
        np.testing.assert_array_equal(x, x_made)


def test_a_square_is_a_turned_part_of_a_picture_and_places_and_turns_vary(tmp_path):
    data = _load(_write(tmp_path, 2, count=1, small=False), batch_size=1).train
    whole = _noise(25, 30, 1)[:24]
    places, turns = set(), set()
    for data.epoch in range(60):
        (((small,), (large,)),) = list(data)
        large = np.round(np.asarray(large) * 255)
        found = [
            (top, left, turn, mirrored)
            for top in range(0, 9, 2) for left in range(0, 15, 2)
            for turn in range(4) for mirrored in (False, True)
            if (np.rot90(whole[top:top + 16, left:left + 16], turn)[:, ::-1 if mirrored else 1]
                == large).all()
        ]  # fmt: skip
        ((top, left, turn, mirrored),) = found
        shrunken = div2k.shrink(whole, 2).numpy()[top // 2 :, left // 2 :][:SIZE, :SIZE]
        expected = np.rot90(shrunken, turn)[:, :: -1 if mirrored else 1]
        np.testing.assert_allclose(small * 255, expected, atol=1.01)
        places.add((top, left))
        turns.add((turn, mirrored))
    assert len(turns) == 8 and len(places) > 20  # of 40


def test_a_shrunken_square_is_a_square_of_the_shrunken_picture():
    for scale in (2, 3, 4):
        picture = tf.constant(_noise(30 * scale, 25 * scale, 5))
        whole = div2k.shrink(picture, scale).numpy().astype(int)
        for top, left in ((0, 0), (22, 17), (7, 9), (0, 17), (21, 3)):
            square = div2k.shrunken_square(picture, tf.constant(top), tf.constant(left), scale, 8)
            difference = np.abs(square.numpy() - whole[top : top + 8, left : left + 8])
            assert difference.max() <= 1 and (difference > 0).mean() < 0.02  # rounding of halves


def test_shrinking_is_the_bicubic_filter_widened_by_the_scale():
    # MATLAB's imresize of a step by 2, by its published weights (Keys, a = -0.5).
    def weight(x):
        x = abs(x)
        return (1.5 * x - 2.5) * x * x + 1 if x < 1 else ((2.5 - 0.5 * x) * x - 4) * x + 2

    line = np.repeat([10, 200], 20).astype(np.uint8)
    picture = np.repeat(np.repeat(line[None, :, None], 8, axis=0), 3, axis=2)
    own = div2k.shrink(tf.constant(picture), 2).numpy()[2, :, 0].astype(int)
    for column in range(4, 16):
        centre = 2 * column + 0.5
        near = [n for n in range(40) if abs(n - centre) < 4]
        weights = np.array([weight((n - centre) / 2) for n in near])
        expected = (weights * line[near]).sum() / weights.sum()
        assert abs(own[column] - np.clip(expected, 0, 255)) <= 0.51


def test_damaged_pictures_are_left_out_or_refused(tmp_path, caplog):
    with pytest.raises(FileNotFoundError, match=r"DIV2K_train_HR.*Unpack DIV2K_train_HR.zip"):
        _load(tmp_path)
    _write(tmp_path, 2, count=101)
    path = tmp_path / "DIV2K_train_HR" / "0007.png"
    path.write_bytes(path.read_bytes()[:200])
    assert _load(tmp_path).train.samples == 100
    assert "1 of 101 pictures are damaged: 0007.png. They are left out." in caplog.text
    small = tmp_path / "DIV2K_train_LR_bicubic" / "X2" / "0009x2.png"
    Image.fromarray(_noise(5, 5, 0)).save(small)  # does not fit its large picture
    with pytest.raises(ValueError, match=r"At most 1 %.*2 of 101 pictures.*0007.png, 0009.png"):
        _load(tmp_path)
    small.unlink()
    with pytest.raises(ValueError, match="2 of 101 pictures"):
        _load(tmp_path)
