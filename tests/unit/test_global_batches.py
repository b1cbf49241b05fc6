"""GlobalBatches over arrays and strings: sharing out, refusals, settings between epochs."""

import copy
import math
import numbers
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.served_batches import as_rank, make, require_shared_out, served
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.data.slices import BatchSlices, StepCount, epoch_order


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9), local=st.integers(1, 5), full=st.integers(0, 5),
    rest=st.integers(0, 40), epoch=st.integers(0, 3), shuffle=st.booleans(), drop=st.booleans(),
)  # fmt: skip
def test_union_over_ranks_is_one_process(size, local, full, rest, epoch, shuffle, drop):
    batch_size = size * local
    samples = max(batch_size * full + rest, batch_size if drop else size)
    if shuffle and not drop:
        samples -= samples % batch_size % size
    options = {"batch_size": batch_size, "seed": 5, "shuffle": shuffle, "drop_remainder": drop}
    ranks = [make(samples, rank, size, **options) for rank in range(size)]
    alone = make(samples, **options)
    found = require_shared_out(ranks, alone, epoch, served, drop, shuffle or drop)
    assert shuffle or found == tuple(range(len(found)))


def test_an_empty_last_slice_is_one_step_less():
    slices = [BatchSlices(10, 8, rank, 4, drop_remainder=False) for rank in range(4)]
    assert [own.steps for own in slices] == [2, 2, 1, 1]
    assert [own.bounds(1) for own in slices] == [
        (8, 9),
        (9, 10),
        (8, 9),
        (8, 9),
    ]  # of which 2 count
    with pytest.raises(IndexError, match=r"below 2. Received: step=2"):
        slices[3].bounds(2)


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 300))
def test_order_is_a_permutation_of_seed_and_epoch(seed, epoch, samples):
    order = epoch_order(seed, epoch, samples)
    assert sorted(order) == list(range(samples))
    np.random.seed(epoch)  # another global state changes nothing
    np.testing.assert_array_equal(order, epoch_order(seed, epoch, samples))


def test_order_differs_between_epochs_and_seeds():
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    data = make(12, batch_size=4, seed=9)
    data.epoch = 3
    assert sum(served(data), start=()) == tuple(epoch_order(9, 3, 12))


def test_nested_structures_keep_their_shape():
    words = [f"word {i}" for i in range(8)]
    x = {"a": np.arange(8), "b": [np.zeros((8, 2)), (np.ones((8, 1), "uint8"),)], "word": words}
    x["pair"] = np.array([words, words]).T
    y = (np.arange(8.0), np.arange(8))
    data = as_rank(GlobalBatches(x, y, sample_weight=np.arange(8), batch_size=4, shuffle=False))
    batch_x, batch_y, weight = data[1]
    assert batch_x.keys() == x.keys() and isinstance(batch_x["b"], tuple)
    assert batch_x["b"][0].shape == (4, 2) and batch_x["b"][1][0].dtype == np.uint8
    np.testing.assert_array_equal(batch_x["a"], [4, 5, 6, 7])
    assert batch_x["pair"].shape == (4, 2)
    assert batch_x["pair"][1, 0] == batch_x["word"][1] == b"word 5"
    np.testing.assert_array_equal(batch_y[1], weight)
    assert batch_y[0].dtype == np.float32, "floats come as floatx, as from fit(x, y)"
    (only_x,) = as_rank(GlobalBatches(np.arange(4), batch_size=2))[0]
    assert only_x.shape == (2,)


def test_memory_mapped_files_are_read_by_slice(tmp_path):
    file = np.memmap(tmp_path / "x", dtype="float32", mode="w+", shape=(10, 3))
    file[:] = np.arange(30).reshape(10, 3)
    data = as_rank(GlobalBatches(file, batch_size=4, shuffle=False))
    assert np.shares_memory(data._source._parts[0], file)
    np.testing.assert_array_equal(data[1][0], file[4:8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros(4), "y": np.zeros(5)}, r"lengths=\[4, 5\]"),
        ({"x": np.zeros(4), "sample_weight": np.zeros(4)}, "y=None"),
        ({"x": iter([1])}, "from_dataset"),
        ({"x": np.zeros(())}, r"shape=\(\)"),
        ({"x": np.array([[1], [1, 2]], dtype=object)}, "dtype=object"),
        ({"x": np.array(["rain", 1], dtype=object)}, "dtype=object"),
        ({"x": np.zeros(4), "seed": -1}, "seed"),
        *(({"x": np.zeros(4), "batch_size": n}, "batch_size") for n in (0, -1, 2.0, "2", True)),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GlobalBatches(**{"batch_size": 2, **arguments})


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (100, {"batch_size": 10}, "batch_size=10, size=4. Use batch_size=8 or 12"),
        (100, {"batch_size": 2}, "batch_size=2, size=4. Use batch_size=4,"),
        (100, {"batch_size": 128}, "batch_size=128, samples=100"),
        (3, {"batch_size": 4, "drop_remainder": False, "shuffle": False}, "samples=3, size=4"),
        (101, {"batch_size": 20, "drop_remainder": False}, "last batch=1, size=4. .* 100 samples"),
    ],
)
def test_what_depends_on_the_ranks_is_refused_at_first_use(samples, options, message):
    data = make(samples, 0, 4, **options)
    with pytest.raises(ConfigError, match=message):
        iter(data)


def test_batch_size_may_be_set_and_the_number_of_workers_may_not():
    data = make(40, 1, 2, batch_size=10)
    assert len(data) == 4
    kept = data.num_batches
    data.batch_size = 4
    assert len(data) == kept == data.steps_for(4) == 10 and len(data[0][0]) == 2
    with pytest.raises(ConfigError, match="Received: batch_size=5, size=2"):
        data.batch_size = 5
    with pytest.raises(ConfigError, match="Received: batch_size=44, samples=40"):
        data.steps_for(44)
    assert data.batch_size == 4, "a refused value changes nothing"
    with pytest.raises(AttributeError, match="workers"):
        data.workers = 4  # more of Keras's workers would not keep the order


def test_a_hand_written_loop_may_use_the_hooks():
    data = make(12, batch_size=4)
    epochs = []
    for _ in range(3):
        data.on_epoch_begin()
        epochs.append(served(data))
        data.on_epoch_end()
    again = make(12, batch_size=4)
    for number, epoch in enumerate(epochs):
        again.epoch = number
        assert served(again) == epoch
    assert data.epoch == 3


def test_state_restores_at_another_number_of_ranks():
    data = make(48, 1, 2, batch_size=8, seed=4)
    data.epoch, data.batch_size = 5, 12
    state = data.state()
    assert state == {"epoch": 5, "batch_size": 12, "seed": 4, "samples": 48}
    ranks = [make(48, rank, 3, batch_size=6) for rank in range(3)]
    for other in ranks:
        other.restore(state)
    together = [sum(step, start=()) for step in zip(*map(served, ranks), strict=True)]
    expected = make(48, batch_size=12, seed=4)
    expected.epoch = 5
    assert together == served(expected)


def test_state_of_other_data_is_refused():
    state = make(48, batch_size=8).state()
    with pytest.raises(ConfigError, match=r"state\['samples'\]=48, samples=40"):
        make(40, batch_size=8).restore(state)
    with pytest.raises(ConfigError, match="Received: batch_size=8, size=3"):
        make(48, 0, 3, batch_size=12).restore(state)


WORDS = ["rain", "snow", "föhn", "hail", "fog", "dew"]
NUMBERS = np.arange(6, dtype="float32")
KINDS = {
    "str": np.array(WORDS),
    "bytes": np.array([word.encode() for word in WORDS]),
    "objects": np.array(WORDS, dtype=object),
    "objects of bytes": np.array([word.encode() for word in WORDS], dtype=object),
    "list": WORDS,
    "tuple of bytes": tuple(word.encode() for word in WORDS),
    "tensor": tf.constant(WORDS),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_strings_are_served_as_tensors(kind, shuffle):
    data = as_rank(GlobalBatches(KINDS[kind], NUMBERS, batch_size=3, shuffle=shuffle))
    for words, own in data:
        assert words.dtype == tf.string and words.shape == (3,)
        assert [word.decode() for word in words.numpy()] == [WORDS[int(i)] for i in own]


def test_a_model_of_words_is_trained():
    def train(x, lookup):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(8, 2), keras.layers.Dense(1)]
        model = keras.Sequential([*lookup, *layers])
        model.compile("sgd", "mse")
        data = as_rank(GlobalBatches(x, NUMBERS, batch_size=3, seed=1))
        model.fit(data, epochs=2, verbose=0, validation_data=data)
        return [v.numpy() for v in model.trainable_variables]

    words = keras.layers.StringLookup(vocabulary=WORDS, num_oov_indices=1)
    expected = train(np.arange(1, 7), [])
    for own, wanted in zip(train(WORDS, [words]), expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-6)


def test_a_step_count_behaves_as_the_integer_that_it_has_at_each_use():
    count = StepCount(4)
    assert list(range(count)) == [0, 1, 2, 3] and (count or -1) is count
    count.value = 0
    assert list(range(count)) == [] and (count or -1) == -1
    count.value = 12
    assert isinstance(count, numbers.Integral)
    assert (int(count), float(count), repr(count), f"{count:03d}") == (12, 12.0, "12", "012")
    assert "%d" % count == "12"  # noqa: UP031
    assert count == 12 and count != 11 and count == StepCount(12)
    assert count > 0 and count >= 12 and count <= 12 and not count < 12
    assert (count + 1, 1 + count, count - 2, 14 - count, -count) == (13, 13, 10, 2, -12)
    assert (count * 2, 24 / count, count // 5, 26 % count, count / 8) == (24, 2.0, 2, 2, 1.5)
    of_shard = (count - 0 + 1 - 1) // 1  # Keras 3.16: the batches of one of one shards
    half = copy.deepcopy(count // 2)
    count.value = 5
    assert list(range(of_shard)) == [0, 1, 2, 3, 4] and bool(of_shard) and half == 6
    assert (of_shard + 1) * 2 == 12 and int(of_shard) == 5 and count // 2 + half == 8
    assert math.log10(StepCount(100)) == 2 and np.log10(StepCount(100)) == 2
    count.value = 12
    assert min(2, count) == 2 and np.asarray(count) == 12
    assert copy.deepcopy(count) == 12 and pickle.loads(pickle.dumps(count)) == 12
