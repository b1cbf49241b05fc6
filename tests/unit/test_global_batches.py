"""GlobalBatches over arrays and strings: sharing out, refusals, settings between epochs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.data.slices import epoch_order


def as_rank(data, rank=0, size=1):
    """Let `data` serve a rank of a job that does not exist."""
    data._rank_and_size = (rank, size)
    return data


def make(samples, rank=0, size=1, **options):
    x = np.arange(samples, dtype="float32")
    return as_rank(GlobalBatches(x, -x, **options), rank, size)


def served(data):
    return [tuple(x.astype(int)) for x, _ in data]


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 6), local=st.integers(1, 5), full=st.integers(1, 5),
    rest=st.integers(0, 40), epoch=st.integers(0, 3), shuffle=st.booleans(), drop=st.booleans(),
)  # fmt: skip
def test_union_over_ranks_is_one_process(size, local, full, rest, epoch, shuffle, drop):
    batch_size = size * local
    samples = batch_size * full + rest
    if shuffle and not drop:
        samples -= samples % batch_size % size
    options = {"batch_size": batch_size, "seed": 5, "shuffle": shuffle, "drop_remainder": drop}
    ranks = [make(samples, rank, size, **options) for rank in range(size)]
    alone = make(samples, **options)
    for data in (*ranks, alone):
        data.epoch = epoch
    pieces = [served(data) for data in ranks]
    for step, batch in enumerate(served(alone)):
        together = sum((own[step] for own in pieces if step < len(own)), start=())
        assert together == batch


def test_order_is_the_permutation_of_seed_and_epoch():
    data = make(12, batch_size=4, seed=9)
    data.epoch = 3
    assert sum(served(data), start=()) == tuple(epoch_order(9, 3, 12))
    assert served(make(5, batch_size=2, shuffle=False, drop_remainder=False)) == [
        (0, 1),
        (2, 3),
        (4,),
    ]


def test_nested_structures_keep_their_shape():
    x = {"a": np.arange(8), "b": [np.zeros((8, 2)), (np.ones((8, 1), "uint8"),)]}
    y = (np.arange(8.0), np.arange(8))
    data = as_rank(GlobalBatches(x, y, sample_weight=np.arange(8), batch_size=4, shuffle=False))
    batch_x, batch_y, weight = data[1]
    assert set(batch_x) == {"a", "b"} and isinstance(batch_x["b"], tuple)
    assert batch_x["b"][0].shape == (4, 2) and batch_x["b"][1][0].dtype == np.uint8
    np.testing.assert_array_equal(batch_x["a"], [4, 5, 6, 7])
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
        ({"x": np.zeros(4), "y": np.zeros(5)}, r"same length.*Received: lengths=\[4, 5\]"),
        ({"x": np.zeros(4), "sample_weight": np.zeros(4)}, r"Received: y=None. Pass y"),
        ({"x": iter([1])}, r"must be arrays.*from_dataset"),
        ({"x": np.zeros(())}, r"first axis.*shape=\(\)"),
        ({"x": np.array([[1], [1, 2]], dtype=object)}, r"dtype=object"),
        ({"x": np.array(["rain", 1], dtype=object)}, r"dtype=object"),
        ({"x": np.zeros(4), "seed": -1}, r"seed must be a whole number of at least 0"),
        ({"x": np.zeros(4), "batch_size": 2.5}, r"Received: batch_size=2.5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GlobalBatches(**{"batch_size": 2, **arguments})


def test_what_depends_on_the_ranks_is_refused_at_first_use():
    with pytest.raises(ConfigError, match="multiple of the number of ranks"):
        make(12, 0, 3, batch_size=4)[0]
    with pytest.raises(ConfigError, match="not be larger than the number of samples"):
        len(make(12, batch_size=13))


def test_batch_size_may_be_set():
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
    with pytest.raises(
        ConfigError, match=r"same data. Received: state\['samples'\]=48, samples=40"
    ):
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
    for words, numbers in data:
        assert words.dtype == tf.string and words.shape == (3,)
        assert [word.decode() for word in words.numpy()] == [WORDS[int(i)] for i in numbers]


def test_columns_and_structures_of_strings():
    x = {"pair": np.array([WORDS, WORDS]).T, "word": WORDS}
    batch, targets = as_rank(GlobalBatches(x, WORDS, batch_size=2, shuffle=False))[1]
    assert batch["pair"].shape == (2, 2) and batch["pair"][1, 0] == b"hail"
    assert batch["word"][0].numpy().decode() == targets[0].numpy().decode() == "föhn"


@pytest.mark.parametrize("kind", ["str", "objects of bytes", "tensor"])
def test_a_model_of_words_is_trained(kind):
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
    for own, wanted in zip(train(KINDS[kind], [words]), expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-6)
