"""Each rank updates its own part of the parameters: equal to one process, float64, 1e-10."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.helpers.equality import (
    EmbeddingModel,
    GhostBatchNormalization,
    conv_model,
    dense_model,
    norm_model,
)
from tests.helpers.ranks import float64, shared_folder
from tests.helpers.versions import HAS_MUON
from tests.parallel.sharded_model import (
    N_STEPS,
    SHARDED,
    Adam,
    check,
    compiled,
    fit,
    require_near,
    require_state,
    sharded,
    single_steps,
    state_of,
)
from tfscale.testing import require_close, require_identical


@sizes(2, 3, 4, timeout_s=300)
def case_every_optimizer():
    for make in SHARDED.values():
        check(dense_model, make)


@sizes(2, 3, 4, timeout_s=300)
def case_every_model():
    for build in (conv_model, EmbeddingModel):
        for name in ("adam", "lars"):
            check(build, SHARDED[name])


CLIPPING = (
    {"clipnorm": 0.02},
    {"global_clipnorm": 0.05},
    {"clipvalue": 0.01},
    {"global_clipnorm": 0.05, "gradient_accumulation_steps": 2},
    {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
)


@sizes(2, 3, 4, timeout_s=300)
def case_clipping(build=dense_model, strategy=None):
    for options in CLIPPING:
        check(build, lambda options=options: keras.optimizers.Adam(0.01, **options), strategy)


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

    for name in ("adam", "lamb", "muon") if HAS_MUON else ("adam", "lamb"):
        check(tiny, SHARDED[name])


@sizes(2, 3, timeout_s=300)
def case_averages_of_kernels_that_another_rank_owns():
    """Keras's moving averages run over all pieces, those of no element included."""
    rules = [keras.optimizers.Lamb, *([keras.optimizers.Muon] if HAS_MUON else [])]
    for rule in rules:
        check(dense_model, functools.partial(rule, 0.01, use_ema=True))
    check(constrained_model, functools.partial(Adam, 0.01, use_ema=True))


@sizes(2, 3, timeout_s=120)
def case_norms_of_parameters_of_several_dtypes():
    """A rank may own parameters of one dtype only, and another rank those of the other."""
    trained = []
    for wrap, train in ((sharded, lambda m: fit(m, 0, N_STEPS)), (lambda o: o, single_steps)):
        keras.utils.set_random_seed(3)
        dense = functools.partial(keras.layers.Dense, use_bias=False)
        parts = [dense(n, dtype=dtype) for n, dtype in ((7, "float64"), (3, "float32"))]
        model = keras.Sequential([keras.Input((6,)), *parts])
        model.compile(wrap(keras.optimizers.Lamb(0.01, clipnorm=0.02)), "mse")
        train(model)
        trained.append(model.get_weights())
    for own, single in zip(*trained, strict=True):
        np.testing.assert_allclose(own, single, rtol=1e-4, atol=1e-6)


@sizes(2, timeout_s=120)
def case_whole_kernels_are_spread_over_ranks():
    layers = [keras.layers.Dense(64, use_bias=False) for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    alone = tfscale.Sharded(bucket_mb=0)
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.Lamb(0.01), exchange=alone), "mse")
    tfscale.prepare(model)
    held = tfscale.allgather_object(model.optimizer.memory_report()["parameters"])
    assert held == [2 * 64 * 64 * 4] * 2, held


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
    with float64():
        single, model = compiled(Adam(0.01)), tfscale.prepare(compiled(sharded(Adam(0.01))))
        for each in (single, model):
            each.optimizer.build(each.trainable_variables)
            for _ in range(3):
                each.optimizer.apply([tf.fill(v.shape, 0.5) for v in each.trainable_variables])
        require_close(model.get_weights(), single.get_weights())


@sizes(2, 3, timeout_s=160)
def case_exclusion_from_weight_decay_after_prepare():
    """By variable, by the name of a layer, which pieces do not have, by the name's beginning."""
    with float64():
        for rule in (keras.optimizers.AdamW, *([keras.optimizers.Muon] if HAS_MUON else [])):
            for excluded in (
                lambda kernel: {"var_list": [kernel]},
                lambda kernel: {"var_names": [kernel.path.split("/")[0]]},
                lambda kernel: {"var_names": ["^kernel"]},
            ):
                model = tfscale.prepare(compiled(sharded(rule(0.01, weight_decay=0.3))))
                single = compiled(rule(0.01, weight_decay=0.3))
                for each in (model, single):
                    named = excluded(each.trainable_variables[0])
                    each.optimizer.exclude_from_weight_decay(**named)
                fit(model, 0, N_STEPS)
                require_state(model, state_of(single_steps(single)))


@sizes(2, timeout_s=80)
def case_a_schedule_in_place_of_a_rate():
    """Set between two fits: the rate is no variable of the optimizer any more."""
    with float64(), shared_folder() as folder:
        model, single = compiled(sharded(Adam(0.01))), compiled(Adam(0.01))
        fit(model, 0, 3)
        single_steps(single, 0, 3)
        for each in (model, single):
            schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
            each.optimizer.learning_rate = schedule
            each.make_train_function(force=True)  # Keras itself would continue with the old rate
        fit(model, 3, N_STEPS, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        require_state(model, state_of(single_steps(single, 3)))
        model.save(folder / "model.keras")
        tfscale.barrier()
        again = keras.models.load_model(folder / "model.keras")
        require_identical(again.optimizer.variables, model.optimizer.full_state())


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        return self.factor * x


def scaled(optimizer):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(5), Scale(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


@sizes(2, timeout_s=120)
def case_numbers_that_are_trained():
    """Rules that need whole variables, a scalar among them: trained, saved, loaded."""
    with float64(), shared_folder() as folder:
        for rule in (keras.optimizers.Lamb, keras.optimizers.Adafactor):
            model, single = scaled(sharded(rule(0.01))), scaled(rule(0.01))
            fit(model, 0, N_STEPS)
            require_state(model, state_of(single_steps(single)))
            path, objects = folder / f"{rule.__name__}.keras", {"Scale": Scale}
            model.save(path)
            tfscale.barrier()
            again = keras.models.load_model(path, custom_objects=objects)
            require_near(state_of(again), state_of(single))
            back = tfscale.load_model(path, custom_objects=objects, exchange=tfscale.Sharded())
            fit(back, 0, 2)
            require_state(back, state_of(single_steps(single, 0, 2)))


@sizes(2, timeout_s=60)
def case_gradients_that_are_values():
    """Scales of float8 layers: their gradient is the next value, which no rule may change."""
    with float64():
        kernel = keras.Variable(np.ones((3, 4)), name="kernel")
        scale = keras.Variable(np.ones(1), name="scale")
        scale.overwrite_with_gradient = True
        optimizer = sharded(Adam(0.1))
        optimizer.build([kernel, scale])
        for value in (3.0, 5.0):
            optimizer.apply([tf.ones((3, 4), tf.float64), tf.constant([value], tf.float64)])
            np.testing.assert_allclose(scale.numpy(), [value], rtol=1e-12)
        assert kernel.numpy().max() < 1.0


@sizes(2, timeout_s=80)
def case_cycles_of_an_optimizer_that_was_built_before():
    """As in a loaded model: the state is cut in the first step, and every batch counts."""
    inner, variables = Adam(0.01), compiled(None).trainable_variables
    inner.build(variables)
    exchange = tfscale.Sharded(dense="weights")
    optimizer = hvd.DistributedOptimizer(inner, exchange=exchange, backward_passes_per_step=2)
    step = tf.function(lambda: optimizer.apply([tf.ones(v.shape) for v in variables], variables))
    for n in range(1, 6):
        step()
        assert int(optimizer.iterations) == n
