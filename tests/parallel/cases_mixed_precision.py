"""Mixed precision: a gradient that is infinite on one rank skips the step on all of them."""

import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import dtype_policy, require_error
from tfscale import DistributedOptimizer
from tfscale.callbacks import BackupAndRestore
from tfscale.testing import require_close, require_equal_ranks

LSO, SGD = keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD
BATCH, STEPS = 4, 3


def new_model(optimizer, **options):
    """A linear model whose input is float32, so that the data may be too large for float16."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def own_data(overflows=True):
    """Three batches; the second one of the last rank overflows."""
    rng = np.random.default_rng(10 + tfscale.rank())
    x = rng.normal(size=(STEPS * BATCH, 2)).astype("float32")
    if overflows and tfscale.rank() == tfscale.size() - 1:
        x[BATCH : 2 * BATCH] = 1e30
    return x, x.sum(axis=1, keepdims=True)


def train(model, callbacks=(), overflows=True):
    x, y = own_data(overflows)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def check_skipped_together(model):
    """Three steps, one of them skipped, on all ranks."""
    optimizer = model.optimizer
    require_equal_ranks([*model.variables, *optimizer.variables])
    assert all(np.isfinite(v.numpy()).all() for v in model.variables)
    assert int(optimizer.iterations) == STEPS - 1
    assert float(optimizer.dynamic_scale) == 256.0


def scaled(inner=None):
    return LSO(inner or SGD(0.01), initial_scale=512.0)


def case_loss_scaling_inside_of_ours():
    fp16 = {"compression": tfscale.Compression.fp16}
    for inner, ours, options in (
        ({"momentum": 0.9}, {}, {}),
        ({"momentum": 0.9}, {}, {"run_eagerly": True}),
        ({"global_clipnorm": 0.1}, fp16, {}),
    ):
        with dtype_policy("mixed_float16"):
            optimizer = DistributedOptimizer(scaled(SGD(0.01, **inner)), **ours)
            model = train(new_model(optimizer, auto_scale_loss=False, **options))
        assert optimizer.inner_optimizer.__class__ is SGD
        check_skipped_together(model)


def case_automatic_loss_scaling_is_repaired():
    """compile() puts a LossScaleOptimizer around ours; prepare turns it inside out."""
    folder = tempfile.mkdtemp()
    for callback in (None, tfscale.callbacks.Callback(), BackupAndRestore(folder)):
        with dtype_policy("mixed_float16"):
            model = new_model(DistributedOptimizer(SGD(0.01)))
            if tfscale.size() > 1:
                assert type(model.optimizer) is LSO
            model.optimizer.initial_scale = 512.0
            if callback is None:
                assert tfscale.prepare(model) is model
                train(model)
            else:
                train(model, [callback])
        assert model.optimizer.__class__ is LSO
        assert model.optimizer.inner_optimizer.__class__ is SGD
        check_skipped_together(model)
        if tfscale.size() > 1:
            assert type(model.optimizer) is DistributedOptimizer
            assert type(model.optimizer.inner_optimizer) is SGD


@sizes(2, 3, 4)
def case_loss_scaling_is_repaired_after_steps_were_traced():
    with dtype_policy("mixed_float16"):
        model = new_model(DistributedOptimizer(SGD(0.01)))
        model.optimizer.initial_scale = 512.0
        model.predict(np.ones((2, 2), "float32"), verbose=0)
        model.make_train_function()
        model.make_test_function()
        tfscale.prepare(model)
        assert model.test_function is None and model.predict_function is None
        check_skipped_together(train(model))


@sizes(2, 3)
def case_loss_scaling_is_repaired_after_an_optimizer_was_cut():
    for is_inner in (False, True):
        weights = []
        for exchange in (tfscale.Sharded(bucket_mb=1e-5), "allreduce"):
            with dtype_policy("mixed_float16"):
                model = new_model(DistributedOptimizer(SGD(0.01, momentum=0.9), exchange=exchange))
                model.optimizer.initial_scale = 512.0
                built = model.optimizer.inner_optimizer if is_inner else model.optimizer
                built.build(model.trainable_variables)
                tfscale.prepare(model)
                train(model)
            assert (model.optimizer.bound.kept is not None) == (exchange != "allreduce")
            assert int(model.optimizer.iterations) == STEPS - 1
            assert float(model.optimizer.dynamic_scale) == 256.0
            require_equal_ranks(model.variables)
            weights.append(model.get_weights())
        # A last bit of a weight may move an activation by a bit of float16, 1e-3 of it, and so a
        # weight by some 1e-5 in a step; a lost slot of momentum moves it by some 1e-2.
        require_close(*weights, rtol=0, atol=1e-4)


@sizes(2, 3)
def case_loss_scaling_around_ours_is_refused():
    text = ("LossScaleOptimizer must be inside", "tfscale.prepare(model)", "auto_scale_loss=False")
    for options in ({}, {"run_eagerly": True}):
        with dtype_policy("mixed_float16"):
            model = new_model(DistributedOptimizer(SGD(0.01)), **options)
            require_error(lambda model=model: train(model, overflows=False), *text)
    explicit = LSO(DistributedOptimizer(SGD(0.01)))
    variable = keras.Variable([1.0], name="weight")
    explicit.build([variable])
    step = tf.function(lambda: explicit.apply([tf.ones([1])], [variable]))
    require_error(step, *text)


def case_bfloat16_needs_no_scaling():
    with dtype_policy("mixed_bfloat16"):
        model = new_model(DistributedOptimizer(SGD(0.01)))
        assert model.optimizer.__class__ is SGD
        train(model, overflows=False)
        assert model.layers[0].compute_dtype == "bfloat16"
    require_equal_ranks([*model.variables, *model.optimizer.variables])
    assert int(model.optimizer.iterations) == STEPS
