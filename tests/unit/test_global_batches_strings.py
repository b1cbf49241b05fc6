"""GlobalBatches over arrays and lists of strings."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.test_global_batches import as_rank
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches

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


@pytest.mark.parametrize("mixed", [["rain", 1], ["rain", None], ["rain", ["snow"]]])
def test_objects_that_are_not_all_strings_are_refused(mixed):
    with pytest.raises(ConfigError, match="numeric or string type.*dtype=object"):
        GlobalBatches(np.array([*mixed, 0], dtype=object), batch_size=1)
    with pytest.raises(ConfigError, match="must be arrays, lists of strings"):
        GlobalBatches(mixed, batch_size=1)


@pytest.mark.parametrize("kind", KINDS)
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
