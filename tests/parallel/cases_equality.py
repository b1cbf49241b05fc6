"""n ranks train exactly as one process: float64, the same global batches, 10 steps, 1e-10."""

import keras

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import (
    LAYERWISE,
    OPTIMIZERS,
    EmbeddingModel,
    GhostBatchNormalization,
    check,
    conv_model,
    dense_model,
    norm_model,
)
from tests.helpers.grid_exchange import EXCHANGES


@sizes(2, 3, 4, timeout_s=180)
def case_every_optimizer():
    for make in OPTIMIZERS.values():
        check(dense_model, make)


@sizes(2, 3, 4, timeout_s=300)
def case_every_model():
    """Sparse gradients with every rule, convolutions with two."""
    for make in OPTIMIZERS.values():
        check(EmbeddingModel, make)
    for name in ("momentum", "adam"):
        check(conv_model, OPTIMIZERS[name])


@sizes(2, 3, 4, timeout_s=600)
def case_every_exchange():
    """Those that other cases leave out, and an example of one's own (docs/architecture.md)."""
    names = ("auto", "chunked", "grid")
    assert EXCHANGES.keys() == {"allreduce", "sharded", *names}
    for name in names:
        check(conv_model, OPTIMIZERS["momentum"], exchange=name)
        check(EmbeddingModel, OPTIMIZERS["adam"], exchange=name)


@sizes(2, 3, timeout_s=120)
def case_layerwise_rates():
    """Ranks that update for themselves have the same bits, whatever is done to their graphs."""
    for make in LAYERWISE.values():
        check(conv_model, make)


@sizes(3, timeout_s=120)
def case_bucket_sizes_and_clipping():
    for bucket_mb in (0, 1e-4, 64):
        check(dense_model, OPTIMIZERS["sgd"], exchange=tfscale.Allreduce(bucket_mb=bucket_mb))
    check(dense_model, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1))


@sizes(2, 3, 4, timeout_s=180)
def case_sync_batch_normalization():
    """Moving statistics too: they are part of the compared variables."""
    plain, synchronised = map(
        norm_model, (keras.layers.BatchNormalization, tfscale.SyncBatchNormalization)
    )
    for name in ("momentum", "adam"):
        check(plain, OPTIMIZERS[name], local_build=synchronised)


@sizes(2, 3, 4, timeout_s=120)
def case_plain_batch_normalization_is_ghost_batches():
    """Moving averages are linear in the batch statistics, so averaging them once is exact."""
    n_parts = tfscale.size()
    check(
        norm_model(lambda: GhostBatchNormalization(n_parts)),
        OPTIMIZERS["momentum"],
        local_build=norm_model(keras.layers.BatchNormalization),
    )
