"""Chunks of layers, and dense layers that exchange activations: options, what pays."""

from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfscale
from tfscale.config import ConfigError, PlanError
from tfscale.exchange.dense import DenseCalls, ReplicatedCall, require_own
from tfscale.exchange.plan import GradientOptions
from tfscale.internals.trace import context_of
from tfscale.plan.buckets import GradientSpec, build_chunks, chunk_layers, layers_of
from tfscale.plan.layers import is_partial_cheaper, is_replicated_cheaper


def test_layers_of_variables():
    names = ["a/kernel", "a/bias", "block/b/gamma", "loose", "block/b/beta"]
    assert layers_of(names) == [[0, 1], [2, 4], [3]]


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=12),
    st.integers(1, 14),
    st.one_of(st.integers(1, 6), st.just("per_layer")),
)
def test_every_layer_is_in_one_chunk(layer_bytes, first, chunks):
    n_layers = len(layer_bytes)
    result = chunk_layers(layer_bytes, first, chunks)
    assert [layer for chunk in result for layer in chunk] == list(reversed(range(n_layers)))
    assert all(result)
    assert len(result) == n_layers if chunks == "per_layer" else len(result) <= chunks
    if chunks != "per_layer" and chunks > 1:
        assert len(result[0]) == min(first, n_layers)


def test_the_rest_is_shared_by_bytes():
    assert chunk_layers([1, 1, 1, 1, 1, 10], 1, 3) == [[5], [4, 3, 2], [1, 0]]


def test_dtypes_travel_apart():
    specs = [GradientSpec(f"l{i}/w", (4,), d) for i, d in enumerate(["float32", "float16"])]
    assert len(build_chunks(specs, 2, 2)) == 2


def test_numbers_must_be_positive():
    for first, chunks in ((0, 2), (1, 0)):
        with pytest.raises(PlanError, match="chunks need a layer"):
            chunk_layers([1, 2], first, chunks)


def test_what_pays_for_layers_of_vgg_a():
    """At a global batch of 256; a batch beyond which weights are fewer; one process."""
    assert is_replicated_cheaper(25088, 4096, 256, 4)
    assert not is_replicated_cheaper(512, 10, 256, 4)
    assert not is_replicated_cheaper(25088, 4096, 256, 1)
    assert is_partial_cheaper(25088, 4096, 256, 4)
    assert not is_partial_cheaper(4096, 1000, 4096, 4)
    assert not is_partial_cheaper(25088, 4096, 256, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tfscale.Chunked(first_chunk_layers=0), "first_chunk_layers must"),
        (lambda: tfscale.Chunked(chunks="all"), "chunks must"),
        (lambda: tfscale.Chunked(replicated_dense=-1), "replicated_dense must"),
        (lambda: tfscale.Chunked(first_chunk_layers=1, first_chunk_from="a"), "Leave one of them"),
    ],
)
def test_bad_options(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


class FourRanks:
    def size(self) -> int:
        return 4


def chosen(strategy: tfscale.Chunked, *layers: keras.layers.Layer, batch=None) -> list[str]:
    """Return the layers that exchange activations; choosing twice changes nothing."""
    model = keras.Sequential([keras.Input((64,)), *layers])
    calls, ranks = DenseCalls(GradientOptions(compression=tfscale.Compression.none)), FourRanks()

    def choose() -> bool:
        return calls.choose(model, strategy, ranks, lambda v: False, lambda v: "", batch)

    has_changed = choose()
    names = [x.name for x in model.layers if isinstance(vars(x).get("call"), ReplicatedCall)]
    assert has_changed is bool(names) and not choose()
    return names


def test_layers_that_cannot_be_replicated_stay_in_the_chunks():
    class OwnDense(keras.layers.Dense):
        pass

    dense = keras.layers.Dense
    names = chosen(
        tfscale.Chunked(replicated_dense=4),
        OwnDense(8),
        dense(8, kernel_regularizer="l2"),
        dense(8, trainable=False),
        dense(8, name="plain"),
    )
    assert names == ["plain"]


def large_and_small() -> list[keras.layers.Layer]:
    return [keras.layers.Dense(units, name=f"{units}") for units in (512, 2)]


def test_auto_takes_large_kernels():
    exchange = tfscale.Chunked(replicated_dense="auto")
    assert chosen(exchange, *large_and_small(), batch=32) == ["512"]
    assert chosen(exchange, *large_and_small()) == []  # the batch size is not known


def test_more_layers_than_there_are():
    with pytest.raises(PlanError, match="needs 3 Dense layers"):
        chosen(tfscale.Chunked(replicated_dense=3), keras.layers.Dense(2))


COUNTS = st.integers(1, 5000)


@given(COUNTS, COUNTS, COUNTS, st.integers(2, 64))
def test_partial_gradients_pay_on_the_condition_of_the_thesis(n_in, n_out, batch, size):
    sent = Fraction(n_in * batch, size) + n_out * batch
    assert is_partial_cheaper(n_in, n_out, batch, size) == (sent < n_in * n_out)


def test_a_gradient_times_a_constant_is_still_the_layers_own():
    """Not so one that is multiplied by another tensor, or by which a constant is divided."""
    kernel = keras.Variable(np.ones(2), name="kernel")

    @tf.function(autograph=False)
    def step(inputs):
        made = tf.identity(inputs)
        context_of(made.graph).made[made.name] = id(kernel)
        for own in (made, made * 0.5, 0.5 * made, made / 2.0):
            require_own(own, kernel)
        for other in (inputs, made * inputs, 2.0 / made):
            with pytest.raises(PlanError, match="must come from back-propagation"):
                require_own(other, kernel)

    step(tf.ones(2))
