"""Each rank updates its own part of the parameters: equal to one process, float64, 1e-10."""

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import require_close
from tests.helpers.spawn import sizes
from tests.helpers.versions import HAS_MUON
from tests.parallel.cases_equality import (
    LAYERWISE,
    OPTIMIZERS,
    EmbeddingModel,
    GhostBatchNormalization,
    conv_model,
    dense_model,
    float64,
    norm_model,
)
from tests.parallel.cases_equality import check as check_whole

SHARDED = {
    "momentum without Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    **({"muon": lambda: keras.optimizers.Muon(0.01)} if HAS_MUON else {}),
    **LAYERWISE,
    **OPTIMIZERS,
}


def check(build, make_optimizer, strategy=None, local_build=None, **options) -> None:
    """Train sharded and in one process; compare weights and the optimizer's complete state."""
    check_whole(build, make_optimizer, strategy or tfscale.Sharded(), local_build, **options)


@sizes(2, 3, 4, timeout_s=300)
def case_every_optimizer():
    for make in SHARDED.values():
        check(dense_model, make)


@sizes(2, 3, 4, timeout_s=300)
def case_every_model():
    for build in (conv_model, EmbeddingModel):
        for name in ("adam", "lars"):
            check(build, SHARDED[name])


@sizes(2, 3, 4, timeout_s=300)
def case_clipping():
    for options in (
        {"clipnorm": 0.02},
        {"global_clipnorm": 0.05},
        {"clipvalue": 0.01},
        {"global_clipnorm": 0.05, "gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    ):
        check(dense_model, lambda options=options: keras.optimizers.Adam(0.01, **options))


@sizes(2, 3, 4, timeout_s=300)
def case_sizes_of_buckets():
    for bucket_mb in (0, 1e-4, 64):
        strategy = tfscale.Sharded(
            bucket_mb=bucket_mb, overlap_forward=False, overlap=bucket_mb > 0
        )
        check(dense_model, SHARDED["adam"], strategy)


def constrained_model() -> keras.Model:
    """A model with a constraint that needs whole columns."""
    limit = keras.constraints.MaxNorm(0.5)
    dense = keras.layers.Dense(7, activation="tanh", kernel_constraint=limit)
    return keras.Sequential([keras.Input((6,)), dense, keras.layers.Dense(3)])


@sizes(2, 3, 4, timeout_s=300)
def case_constraints_and_shared_layers():
    check(constrained_model, SHARDED["adam"])

    def sharing() -> keras.Model:
        inputs = keras.Input((6,))
        layer = keras.layers.Dense(6, activation="tanh")
        return keras.Model(inputs, keras.layers.Dense(3)(layer(layer(inputs))))

    check(sharing, SHARDED["momentum"])


@sizes(4, timeout_s=120)
def case_fewer_parameters_than_ranks():
    def tiny() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, use_bias=False)])

    for name in ("adam", "lamb"):
        check(tiny, SHARDED[name])


@sizes(2, 3, 4, timeout_s=300)
def case_batch_normalization():
    plain, synchronised = (
        norm_model(layer)
        for layer in (keras.layers.BatchNormalization, tfscale.SyncBatchNormalization)
    )
    check(plain, SHARDED["adam"], local_build=synchronised)
    check(
        norm_model(lambda: GhostBatchNormalization(tfscale.size())),
        SHARDED["momentum"],
        local_build=plain,
    )


@sizes(2, timeout_s=120)
def case_built_twice_and_applied_without_variables():
    """As a loop of one's own does: build after prepare, apply(gradients) alone."""
    results = []
    for wrap in (
        lambda rule: rule,
        lambda rule: hvd.DistributedOptimizer(rule, exchange="sharded"),
    ):
        with float64():
            keras.utils.set_random_seed(1)
            model = dense_model()
            model.compile(wrap(SHARDED["adam"]()), loss="mse")
            tfscale.prepare(model)
            model.optimizer.build(model.trainable_variables)
            gradients = [np.full(v.shape, 0.5) for v in model.trainable_variables]
            for _ in range(3):
                model.optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients])
            results.append(model.get_weights())
    require_close(*results)
