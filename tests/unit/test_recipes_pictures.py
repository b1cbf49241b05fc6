"""CIFAR-10, HDF5, generated pictures, augmentation and fixed shares."""

import pickle
from pathlib import Path

import datasets
import h5py
import numpy as np
import pytest
from datasets import cifar10, generated, hdf5
from datasets.pictures import LabelledPictures, PictureSets, augmented_batches

from tests.helpers.picture_files import striped, write_cifar10
from tests.unit.test_global_batches import as_rank


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("below", [False, True])
def test_cifar10_is_found_in_both_versions(tmp_path, binary, below):
    labels = write_cifar10(tmp_path, 3, binary=binary)
    (folder,) = tmp_path.iterdir()
    train, test, classes = cifar10.load(str(folder if below else tmp_path))
    assert train.pictures.shape == (20, 32, 32, 3) and train.pictures.dtype == np.uint8
    assert test.pictures.shape == (4, 32, 32, 3) and classes == 10
    np.testing.assert_array_equal(train.labels, labels[:5].ravel())
    np.testing.assert_array_equal(test.labels, labels[5])
    red = striped(labels[5], 32, 3)
    np.testing.assert_array_equal(test.pictures, np.stack([red, red // 2, red // 4], axis=-1))


def test_a_pickle_that_runs_something_is_refused(tmp_path):
    write_cifar10(tmp_path, 0)

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="test_batch: it names"):
        cifar10.load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def _sets(channels):
    random = np.random.default_rng(0)
    shape = (28, 28, channels)
    parts = (random.integers(0, 256, (count, *shape), np.uint8) for count in (7, 4))
    train, test = (LabelledPictures(x, np.arange(len(x)) % 3) for x in parts)
    return PictureSets(train, test, 3)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("low", [0.0, -1.0])
def test_hdf5_as_in_the_paper(tmp_path, channels, low):
    path, sets = str(tmp_path / "set.h5"), _sets(channels)
    hdf5.write(path, sets, ["a", "b", "c"])
    if low < 0:  # CIFAR-10 is stored from -1 to 1.
        with h5py.File(path, "r+") as file:
            for part in ("train", "test"):
                file[f"{part}/images"][...] = file[f"{part}/images"][...] * 2 - 1
    read = datasets.load(path, "")
    for own, expected in zip(read[:2], sets[:2], strict=True):
        np.testing.assert_array_equal(own.pictures, expected.pictures)
        np.testing.assert_array_equal(own.labels, expected.labels)
    assert read.classes == 3


def test_generated_pictures_depend_on_the_seed_only_and_every_class_comes():
    (one, test, classes), again = generated.load(), generated.load()
    np.testing.assert_array_equal(one.pictures, again.train.pictures)
    assert one.pictures.shape == (4096, 32, 32, 3) and one.pictures.dtype == np.uint8
    assert set(np.bincount(one.labels)) <= {409, 410} and len(test.labels) == 1024
    assert classes == 10 and (generated.load(seed=1).train.labels != one.labels).any()


def _positions(count=10):
    """Pictures whose pixels say where they are: no two alike, none 0."""
    pictures = np.arange(1, count * 64 + 1).reshape(count, 8, 8, 1).astype(np.uint16)
    return LabelledPictures(pictures, np.arange(count))


def test_augmentation_shifts_and_mirrors():
    data = as_rank(augmented_batches(_positions(), batch_size=10, seed=2, border=2), 0, 1)
    seen = set()
    for data.epoch in range(40):
        ((pictures, labels),) = list(data)
        for picture, label in zip(np.asarray(pictures), np.asarray(labels), strict=True):
            whole = np.pad(_positions().pictures[label], ((2, 2), (2, 2), (0, 0)))
            fits = {
                (top, left, mirrored)
                for top in range(5) for left in range(5) for mirrored in (False, True)
                if (whole[top:top + 8, left:left + 8][:, ::-1 if mirrored else 1] == picture).all()
            }  # fmt: skip
            assert len(fits) == 1
            seen |= fits
    assert len(seen) == 50
