"""DistributedOptimizer.apply on given gradients equals the plain optimizer on their mean."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import require_close, require_equal_ranks, require_error, values_of
from tests.helpers.spawn import sizes
from tfscale import Compression, DistributedOptimizer, Sum

SHAPES = ((2, 3), (3,), (4, 1), ())
SGD, Adam, AdamW = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW


def new_variables(dtype="float64"):
    names = ("kernel", "bias", "other/kernel", "scale")
    return [
        keras.Variable(np.ones(shape), dtype=dtype, name=name.replace("/", "_"))
        for shape, name in zip(SHAPES, names, strict=True)
    ]


def gradients(step, factor, dtype="float64"):
    """Gradients of whole numbers that differ between steps and variables."""
    step = tf.cast(step, dtype)
    return [
        tf.reshape(tf.range(np.prod(s, dtype=int), dtype=dtype) - i + step, s) * factor
        for i, s in enumerate(SHAPES)
    ]


def mean_factor():
    return (tfscale.size() + 1) / 2


def run(optimizer, factor, steps=5, is_traced=True, is_built=True, dtype="float64"):
    variables = new_variables(dtype)
    if is_built:
        optimizer.build(variables)

    def step(number):
        optimizer.apply(gradients(number, factor, dtype), variables)

    step = tf.function(step) if is_traced else step
    for number in range(steps):
        step(tf.constant(number))
    return variables


def check(make_optimizer, factor=None, steps=5, modes=(True, False), **options):
    """Compare with one optimizer that is given `factor` times the pattern, by default the mean."""
    factor = mean_factor() if factor is None else factor
    plain = make_optimizer()
    expected = values_of(run(plain, factor, steps))
    for is_traced in modes:
        optimizer = DistributedOptimizer(make_optimizer(), **options)
        variables = run(optimizer, tfscale.rank() + 1.0, steps, is_traced)
        require_close(variables, expected, rtol=1e-13, atol=1e-13)
        require_equal_ranks([*variables, *optimizer.variables])
        assert int(optimizer.iterations) == int(plain.iterations)


def case_gradients_are_clipped_after_the_reduction():
    """A local norm or value would be clipped differently on each rank."""
    for clipping in ({"clipnorm": 3.0}, {"global_clipnorm": 3.0}, {"clipvalue": 1.5}):
        check(lambda clipping=clipping: SGD(0.1, **clipping))


def case_averages_of_weights_decay_and_accumulation_by_keras():
    check(lambda: SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2))
    check(lambda: SGD(0.1, weight_decay=0.5))
    check(lambda: Adam(0.1, gradient_accumulation_steps=2), steps=4)


def case_sum_predivide_and_groups():
    size = tfscale.size()
    check(lambda: SGD(0.125), factor=size * mean_factor(), op=Sum)
    check(lambda: SGD(0.1), gradient_predivide_factor=4.0)
    check(lambda: SGD(0.1), gradient_predivide_factor=float(size))
    for number in (1, 2, 3, 99):
        check(lambda: SGD(0.1), modes=(True,), num_groups=number)
        check(lambda: SGD(0.1), modes=(True,), groups=number)
    for bucket_mb in ("auto", 0, 1e-5, 4):
        check(lambda: SGD(0.1), modes=(True,), exchange=tfscale.Allreduce(bucket_mb=bucket_mb))


def case_groups_of_variables():
    variables = new_variables()
    outside = keras.Variable([1.0], name="not_trained")
    optimizer = DistributedOptimizer(
        SGD(1.0), groups=[[variables[3], outside, variables[0]], [variables[1]]]
    )
    tf.function(lambda: optimizer.apply(gradients(0, tfscale.rank() + 1.0), variables))()
    for variable, gradient in zip(variables, gradients(0, mean_factor()), strict=True):
        np.testing.assert_array_equal(variable.numpy(), 1.0 - gradient.numpy())
    require_groups_apart(variables)


def require_groups_apart(variables):
    if tfscale.size() == 1:
        return
    twice = DistributedOptimizer(SGD(1.0), groups=[[variables[0]], variables[:2]])
    require_error(
        lambda: twice.apply(gradients(0, 1.0), variables),
        "PlanError: A variable must be in one group only.",
    )


def case_compressed_gradients():
    for compression in (Compression.fp16, Compression.bf16):
        check(lambda: SGD(0.125), compression=compression)


def case_unbuilt_optimizer_and_scheduled_learning_rate():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [1.0, 0.5, 0.25])
    expected = run(SGD(schedule, momentum=0.5), mean_factor())
    optimizer = DistributedOptimizer(SGD(schedule, momentum=0.5))
    variables = run(optimizer, tfscale.rank() + 1.0, is_built=False)
    require_close(variables, expected, rtol=1e-14, atol=0)


def case_learning_rate_changes_between_traced_steps():
    variables = new_variables()
    optimizer = DistributedOptimizer(SGD(1.0))
    step = tf.function(lambda: optimizer.apply(gradients(0, tfscale.rank() + 1.0), variables))
    step()
    optimizer.learning_rate = 0.5
    step()
    assert float(optimizer.learning_rate.numpy()) == 0.5
    np.testing.assert_array_equal(
        variables[0].numpy(), 1.0 - 1.5 * gradients(0, mean_factor())[0].numpy()
    )


def case_gradients_of_several_dtypes():
    single, double = new_variables("float32"), new_variables("float64")
    half = new_variables("bfloat16")
    optimizer = DistributedOptimizer(SGD(0.5))
    everything = [*single, *double, *half]

    @tf.function
    def step():
        own = [
            g for d in ("float32", "float64", "bfloat16") for g in gradients(0, tfscale.rank(), d)
        ]
        optimizer.apply(own, everything)

    step()
    expected = [1.0 - 0.5 * g.numpy() for g in gradients(0, (tfscale.size() - 1) / 2)]
    for variables in (single, double, half):
        for variable, wanted in zip(variables, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(variable.numpy(), "float64"), wanted)


def case_variables_without_a_gradient():
    variables = new_variables()
    optimizer = DistributedOptimizer(SGD(1.0))
    own = gradients(0, tfscale.rank() + 1.0)
    own[1] = None
    tf.function(lambda: optimizer.apply(own, variables))()
    assert (variables[1].numpy() == 1.0).all()
    mean = gradients(0, mean_factor())
    np.testing.assert_array_equal(variables[0].numpy(), 1.0 - mean[0].numpy())


def case_apply_gradients_returns_iterations():
    variables = new_variables()
    optimizer = DistributedOptimizer(SGD(1.0))
    own = gradients(0, tfscale.rank() + 1.0)
    for number in (1, 2):
        result = optimizer.apply_gradients(zip(own, variables, strict=True))
        assert int(result.numpy()) == number
    np.testing.assert_array_equal(
        variables[0].numpy(), 1.0 - 2 * gradients(0, mean_factor())[0].numpy()
    )


@sizes(2, 3, 4)
def case_nothing_to_train_is_refused():
    require_error(lambda: DistributedOptimizer(SGD(1.0)).apply([], []), "ConfigError", "variables")


@sizes(2, 3, 4)
def case_eager_gradients_that_differ_name_both_ranks():
    variables = new_variables()
    optimizer = DistributedOptimizer(SGD(1.0))
    own = gradients(0, 1.0)
    if tfscale.rank() == 1:
        own[2] = None
    require_error(
        lambda: optimizer.apply(own, variables),
        "ExchangeError: All ranks must call the same collectives",
        "rank 0 calls gradients(",
        "rank 1 calls gradients(",
    )
