"""DistributedOptimizer.apply on given gradients equals the plain optimizer on their mean."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import engine_only, sizes
from tests.helpers.ranks import require_error, values_of
from tfscale import Allreduce, Compression, DistributedOptimizer, Sum
from tfscale.testing import inspect, require_close, require_equal_ranks

SHAPES = {"kernel": (2, 3), "bias": (3,), "other_kernel": (4, 1), "scale": ()}
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def new_variables(dtype="float64"):
    return [keras.Variable(np.ones(s), dtype=dtype, name=name) for name, s in SHAPES.items()]


def gradients(step, factor, dtype="float64"):
    """Gradients of whole numbers that differ between steps and variables."""
    step = tf.cast(step, dtype)
    return [
        tf.reshape(tf.range(np.prod(s, dtype=int), dtype=dtype) - i + step, s) * factor
        for i, s in enumerate(SHAPES.values())
    ]


def mean_factor():
    return (tfscale.size() + 1) / 2


def own_gradients():
    return gradients(0, tfscale.rank() + 1.0)


def run(optimizer, factor, steps=5, is_traced=True, is_built=True):
    variables = new_variables()
    if is_built:
        optimizer.build(variables)

    def step(number):
        optimizer.apply(gradients(number, factor), variables)

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
    return expected


def require_first_step(variables, rate=1.0):
    """The first variable has made one step with the mean."""
    mean = gradients(0, mean_factor())[0].numpy()
    np.testing.assert_array_equal(variables[0].numpy(), 1.0 - rate * mean)


def case_what_keras_does_to_gradients_comes_after_the_reduction():
    """A local norm or value would be clipped differently on each rank."""
    for options in (
        {"clipnorm": 3.0},
        {"global_clipnorm": 3.0},
        {"clipvalue": 1.5},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"weight_decay": 0.5},
    ):
        check(lambda options=options: SGD(0.1, **options))
    check(lambda: Adam(0.1, gradient_accumulation_steps=2), steps=4)


def case_scaled_gradients_are_reduced_then_unscaled_then_clipped():
    """One process with the mean gradients: clipping them while scaled would shorten all of them."""

    def scaled(**options):
        inner = SGD(0.1, momentum=0.9, **options)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)

    shortened = check(lambda: scaled(global_clipnorm=2.0))
    loose = values_of(run(scaled(), mean_factor()))
    assert any(not np.allclose(*pair) for pair in zip(shortened, loose, strict=True))


def case_sum_predivide_and_groups():
    size = tfscale.size()
    check(lambda: SGD(0.125), factor=size * mean_factor(), op=Sum)
    for factor in (4.0, float(size)):
        check(lambda: SGD(0.1), gradient_predivide_factor=factor)
    for options in (
        *({name: number} for name in ("num_groups", "groups") for number in (2, 99)),
        *({"exchange": Allreduce(bucket_mb=bucket_mb)} for bucket_mb in ("auto", 0, 1e-5)),
    ):
        check(lambda: SGD(0.1), modes=(True,), **options)


@engine_only("its events are counted")
@sizes(2)
def case_numbers_of_groups_are_numbers_of_messages():
    rows = [(1, 1), (2, 2), (4, 4), (99, 4)]
    for options, expected in (
        *(({name: given}, n) for name in ("num_groups", "groups") for given, n in rows),
        *(({"exchange": Allreduce(bucket_mb=mb)}, n) for mb, n in ((0, 4), (1, 1))),
    ):
        inspect.take_collectives()
        run(DistributedOptimizer(SGD(0.1), **options), 1.0, steps=1)
        events = inspect.take_collectives()
        assert sum(e.plan >= 0 and e.slot >= 0 for e in events) == expected, options


def case_groups_of_variables():
    variables = new_variables()
    outside = keras.Variable([1.0], name="not_trained")
    groups = [[variables[3], outside, variables[0]], [variables[1]]]
    optimizer = DistributedOptimizer(SGD(1.0), groups=groups)
    tf.function(lambda: optimizer.apply(own_gradients(), variables))()
    for variable, gradient in zip(variables, gradients(0, mean_factor()), strict=True):
        np.testing.assert_array_equal(variable.numpy(), 1.0 - gradient.numpy())
    if tfscale.size() > 1:
        twice = DistributedOptimizer(SGD(1.0), groups=[[variables[0]], variables[:2]])
        text = "PlanError: groups must not share a variable."
        require_error(lambda: twice.apply(gradients(0, 1.0), variables), text)


def case_compressed_gradients():
    for compression in (Compression.fp16, Compression.bf16):
        check(lambda: SGD(0.125), compression=compression)


def after_one_step(gradient, **options):
    """Return zeros after one step of SGD at the rate 1, with this gradient on all ranks."""
    variable = keras.Variable(np.zeros(3), dtype="float32", name="kernel")
    optimizer = DistributedOptimizer(SGD(1.0), **options)
    tf.function(lambda: optimizer.apply([tf.fill([3], np.float32(gradient))], [variable]))()
    require_equal_ranks([variable])
    return variable.numpy()


@sizes(2, 3, 4)
def case_options_that_leave_whole_numbers_as_they_are():
    """Compression rounds what is sent; sums beyond float32 are finite after a division.

    A third has 24 bits of its own; 11 and 8 arrive, and sums of a few ranks lose some more.
    """
    third = np.float32(1.0 / 3.0)
    np.testing.assert_allclose(after_one_step(third), -third, rtol=1e-6)
    for compression, bits in ((Compression.fp16, 11), (Compression.bf16, 8)):
        error = np.abs(after_one_step(third, compression=compression) + third) / third
        assert (error > 2.0 ** -(bits + 3)).all(), (compression, error)
        assert (error < 2.0 ** -(bits - 3)).all(), (compression, error)
    assert np.isinf(after_one_step(2.5e38)).all()
    predivided = after_one_step(2.5e38, gradient_predivide_factor=float(tfscale.size()))
    np.testing.assert_allclose(predivided, -2.5e38, rtol=1e-6)


def case_unbuilt_optimizer_and_scheduled_learning_rate():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [1.0, 0.5, 0.25])
    expected = run(SGD(schedule, momentum=0.5), mean_factor())
    optimizer = DistributedOptimizer(SGD(schedule, momentum=0.5))
    variables = run(optimizer, tfscale.rank() + 1.0, is_built=False)
    require_close(variables, expected, rtol=1e-14, atol=0)


def case_learning_rate_changes_between_traced_steps():
    variables, optimizer = new_variables(), DistributedOptimizer(SGD(1.0))
    step = tf.function(lambda: optimizer.apply(own_gradients(), variables))
    step()
    optimizer.learning_rate = 0.5
    step()
    assert float(optimizer.learning_rate.numpy()) == 0.5
    require_first_step(variables, rate=1.5)


def case_gradients_of_several_dtypes():
    dtypes, optimizer = ("float32", "float64", "bfloat16"), DistributedOptimizer(SGD(0.5))
    variables = [v for dtype in dtypes for v in new_variables(dtype)]
    own = [g for dtype in dtypes for g in gradients(0, tfscale.rank(), dtype)]
    tf.function(lambda: optimizer.apply(own, variables))()
    expected = [1.0 - 0.5 * g.numpy() for g in gradients(0, (tfscale.size() - 1) / 2)]
    for variable, wanted in zip(variables, expected * 3, strict=True):
        np.testing.assert_array_equal(np.asarray(variable.numpy(), "float64"), wanted)


def case_variables_without_a_gradient():
    variables, optimizer, own = new_variables(), DistributedOptimizer(SGD(1.0)), own_gradients()
    own[1] = None
    tf.function(lambda: optimizer.apply(own, variables))()
    assert (variables[1].numpy() == 1.0).all()
    require_first_step(variables)


def case_apply_gradients_returns_iterations():
    variables, optimizer = new_variables(), DistributedOptimizer(SGD(1.0))
    for number in (1, 2):
        result = optimizer.apply_gradients(zip(own_gradients(), variables, strict=True))
        assert int(result.numpy()) == number
    require_first_step(variables, rate=2)


@sizes(2, 3, 4)
def case_eager_gradients_that_differ_name_both_ranks():
    """And nothing to train is refused."""
    variables, own = new_variables(), gradients(0, 1.0)
    if tfscale.rank() == 1:
        own[2] = None
    require_error(
        lambda: DistributedOptimizer(SGD(1.0)).apply(own, variables),
        "ExchangeError: ranks called different collectives",
        *("rank 0 calls gradients(", "rank 1 calls gradients("),
    )
    require_error(lambda: DistributedOptimizer(SGD(1.0)).apply([], []), "ConfigError", "variables")
