"""Chunks of layers: every layer in one, first k in the first, about equal bytes in the others."""

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfscale
from tfscale.comm.compression import Compression
from tfscale.config import ConfigError, PlanError
from tfscale.exchange.dense import DenseCalls, ReplicatedCall
from tfscale.exchange.plan import GradientOptions
from tfscale.plan.buckets import GradientSpec, build_chunks, chunk_layers, layers_of
from tfscale.plan.layers import is_replicated_cheaper


def test_layers_of_variables():
    names = ["a/kernel", "a/bias", "block/b/gamma", "loose", "block/b/beta"]
    assert layers_of(names) == [[0, 1], [2, 4], [3]]


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=12),
    st.integers(1, 14),
    st.one_of(st.integers(1, 6), st.just("per_layer")),
)
def test_every_layer_is_in_one_chunk(layer_bytes, first, chunks):
    result = chunk_layers(layer_bytes, first, chunks)
    flat = [layer for chunk in result for layer in chunk]
    assert flat == list(reversed(range(len(layer_bytes))))
    assert all(result)
    if chunks == "per_layer":
        assert len(result) == len(layer_bytes)
    else:
        assert len(result) <= chunks
        if chunks > 1:
            assert len(result[0]) == min(first, len(layer_bytes))


def test_the_rest_is_shared_by_bytes():
    assert chunk_layers([1, 1, 1, 1, 1, 10], 1, 3) == [[5], [4, 3, 2], [1, 0]]


def test_dtypes_travel_apart():
    specs = [GradientSpec(f"l{i}/w", (4,), d) for i, d in enumerate(["float32", "float16"])]
    assert len(build_chunks(specs, 2, 2)) == 2


@pytest.mark.parametrize("first, chunks", [(0, 2), (1, 0)])
def test_numbers_must_be_positive(first, chunks):
    with pytest.raises(PlanError, match="A chunk needs a layer"):
        chunk_layers([1, 2], first, chunks)


def test_replication_pays_where_the_kernel_is_large():
    assert is_replicated_cheaper(25088, 4096, 256, 4)
    assert not is_replicated_cheaper(512, 10, 256, 4)
    assert not is_replicated_cheaper(25088, 4096, 256, 1)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"first_chunk_layers": 0}, "first_chunk_layers must be 1 or more, or 'auto'"),
        ({"chunks": "all"}, "chunks must be 1 or more, or 'per_layer'"),
        ({"replicated_dense": -1}, "replicated_dense must be 0 or more, or 'auto'"),
        ({"replicated_dense": "auto"}, "needs the batch size"),
        ({"first_chunk_layers": 1, "first_chunk_from": "a"}, "Leave one of them out"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ConfigError, match=text):
        tfscale.Chunked(**options)


class FourRanks:
    def size(self) -> int:
        return 4


def chosen(strategy: tfscale.Chunked, *layers: keras.layers.Layer) -> list[str]:
    """Return the layers that exchange activations; choosing twice changes nothing."""
    model = keras.Sequential([keras.Input((64,)), *layers])
    calls, ranks = DenseCalls(GradientOptions(compression=Compression.none)), FourRanks()

    def choose() -> bool:
        return calls.choose(
            model, strategy, ranks, lambda v: False, lambda v: "", global_batch=None
        )

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


def test_auto_takes_large_kernels():
    large, small = keras.layers.Dense(512, name="large"), keras.layers.Dense(2, name="small")
    assert chosen(tfscale.Chunked(replicated_dense="auto", global_batch=32), large, small) == [
        "large"
    ]


def test_more_layers_than_there_are():
    with pytest.raises(PlanError, match="must have 3 Dense layers"):
        chosen(tfscale.Chunked(replicated_dense=3), keras.layers.Dense(2))
