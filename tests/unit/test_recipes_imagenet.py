"""ImageNet as folders and as TFRecords: layouts, preparation, damage, sharing out."""

import io
import shutil

import numpy as np
import pytest
import tensorflow as tf
from datasets import imagenet, tfrecords
from PIL import Image

from tests.helpers.single_job import single_job  # noqa: F401

CLASSES = ("n01", "n02", "n03")
COUNT = 120  # training pictures: one of them is less than 1 %


def _picture(number):
    """Return a file of a picture of 40x60 or 60x40 in one colour, which tells its number."""
    shape = (40, 60) if number % 2 else (60, 40)
    colour = (number // 12 * 20, number % 12 * 20, 100)  # by 20: JPEG rounds
    array = np.broadcast_to(np.array(colour, np.uint8), (*shape, 3))
    content = io.BytesIO()
    Image.fromarray(array).save(content, "JPEG", quality=100, subsampling=0)
    return content.getvalue()


def _write_folders(folder):
    for part, count in (("train", COUNT), ("val", 9)):
        for number in range(count):
            path = folder / part / CLASSES[number % 3] / f"{part}_{number:04d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_picture(number))
    return folder


def _write_tfrecords(folder):
    for part, count, shards in (("train", COUNT, 4), ("validation", 9, 2)):
        for shard in range(shards):
            path = folder / f"{part}-{shard:05d}-of-{shards:05d}"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for number in range(shard, count, shards):
                    example = tf.train.Example()
                    features = example.features.feature
                    features["image/encoded"].bytes_list.value.append(_picture(number))
                    features["image/class/label"].int64_list.value.append(number % 3 + 1)
                    writer.write(example.SerializeToString())
    return folder


@pytest.fixture(params=[_write_folders, _write_tfrecords])
def folder(request, tmp_path):
    return request.param(tmp_path)


def _load(folder):
    return imagenet.load(str(folder), batch_size=20, seed=1, size=28)


def test_pictures_have_their_labels_and_the_mean_is_subtracted(folder):
    data = _load(folder)
    assert data.train.samples == COUNT and data.valid.samples == 9
    numbers = []
    for pictures, labels in data.train:
        assert pictures.shape == (20, 28, 28, 3) and pictures.dtype == tf.float32
        colours = np.asarray(pictures).mean(axis=(1, 2)) + imagenet.MEAN
        np.testing.assert_allclose(colours[:, 2], 100, atol=2.5)
        digits = np.round(colours[:, :2] / 20).astype(int)
        own = digits[:, 0] * 12 + digits[:, 1]
        np.testing.assert_array_equal(own % 3, labels)
        numbers += own.tolist()
    assert sorted(numbers) == list(range(COUNT)) and numbers != sorted(numbers)
    valid = np.concatenate([np.asarray(labels) for _, labels in data.valid])
    assert sorted(valid) == sorted(n % 3 for n in range(9))


def _damage_one(folder):
    """Cut one training picture short, or make it no picture."""
    if (folder / "train").is_dir():
        path = folder / "train" / "n02" / "train_0004.JPEG"
        path.write_bytes(path.read_bytes()[:300])
        return path.name
    path = folder / "train-00001-of-00004"
    begin = tfrecords.index([path]).offsets[3]
    content = path.read_bytes()
    place = content.index(b"\xff\xd8\xff", begin)
    path.write_bytes(content[:place] + b"???" + content[place + 3 :])
    return f"{path.name} byte {begin}"


def test_damaged_pictures_are_left_out_and_known_from_then_on_but_one_percent_is_an_error(
    folder, caplog
):
    def notes():
        return {path: path.stat().st_mtime_ns for path in (folder / ".checked").iterdir()}

    name = _damage_one(folder)
    assert _load(folder).train.samples == COUNT - 1
    assert f"1 of {COUNT} pictures are damaged: {name}. They are left out." in caplog.text
    before = notes()
    assert len(before) == 3  # of both parts, and .gitignore
    data = _load(folder).train
    assert data.samples == COUNT - 1 and sum(len(y) for _, y in data) == 100
    assert notes() == before
    for path, content in zip(sorted(before)[1:], (b"", b"[0, "), strict=True):
        path.write_bytes(content)  # as after a full disk
    assert _load(folder).train.samples == COUNT - 1 and notes() != before
    if (folder / "train").is_dir():
        (folder / "train" / "n01" / "train_0000.JPEG").write_bytes(b"")
    else:
        path = folder / "train-00002-of-00004"
        begin = tfrecords.index([path]).offsets[-3] - 12
        content = path.read_bytes()  # with a wrong length: where the next ones begin is lost
        path.write_bytes(content[:begin] + b"\xff" * 8 + content[begin + 8 :])
        assert tfrecords.index([path]).lost == 3
    with pytest.raises(ValueError, match=rf"At most 1 % .*Received: [24] of {COUNT} pictures"):
        _load(folder)


def test_validation_has_the_classes_of_training(tmp_path):
    val = _write_folders(tmp_path) / "val"
    (val / "n04").mkdir()
    with pytest.raises(ValueError, match=r"val must .*train.*none missing, 1 \(n04\) besides"):
        _load(tmp_path)
    shutil.rmtree(val / "n02")
    with pytest.raises(ValueError, match=r"1 \(n02\) missing, 1 \(n04\) besides"):
        _load(tmp_path)


@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (256, 256), (100, 90), (257, 1000)])
def test_the_shorter_side_becomes_256_and_squares_of_224_are_cut(shape):
    picture = tf.cast(tf.random.stateless_uniform((*shape, 3), (1, 2)) * 255, tf.uint8)
    rows, columns = (round(256 * n / min(shape)) for n in shape)
    scaled = tf.image.resize(picture, (rows, columns), antialias=True)
    top, left = (rows - 224) // 2, (columns - 224) // 2
    expected = scaled[top : top + 224, left : left + 224] - imagenet.MEAN
    np.testing.assert_allclose(imagenet.middle_cut(picture, 224), expected, rtol=1e-6)
    seeds = tf.constant([[seed, 3] for seed in range(4)], tf.int64)
    cuts = [imagenet.random_cut(picture, 224, seed) for seed in seeds]
    assert {cut.shape for cut in cuts} == {(224, 224, 3)}
    assert any((cuts[0] != cut).numpy().any() for cut in cuts[1:])
