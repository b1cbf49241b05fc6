"""Options of the optimizer that leave exact numbers as they are: what shows that they act."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import require_equal_ranks, values_of
from tests.helpers.spawn import engine_only, sizes
from tests.parallel.cases_optimizer import SGD, check, mean_factor, run
from tfscale import Compression, DistributedOptimizer
from tfscale.comm import runtime

THIRD = np.float32(1.0 / 3.0)


def after_one_step(gradient: float, **options: object) -> np.ndarray:
    """Return what becomes of one zero when all ranks have this gradient, at the rate 1."""
    variable = keras.Variable(np.zeros(3), dtype="float32", name="kernel")
    optimizer = DistributedOptimizer(SGD(1.0), **options)
    tf.function(lambda: optimizer.apply([tf.fill([3], np.float32(gradient))], [variable]))()
    require_equal_ranks([variable])
    return variable.numpy()


@sizes(2, 3, 4)
def case_compression_rounds_what_travels():
    """A third has 24 bits of its own; 11 and 8 arrive, and sums of a few ranks lose some more."""
    np.testing.assert_allclose(after_one_step(THIRD), -THIRD, rtol=1e-6)
    for compression, bits in ((Compression.fp16, 11), (Compression.bf16, 8)):
        error = np.abs(after_one_step(THIRD, compression=compression) + THIRD) / THIRD
        assert (error > 2.0 ** -(bits + 3)).all(), (compression, error)
        assert (error < 2.0 ** -(bits - 3)).all(), (compression, error)


@sizes(2, 3, 4)
def case_predivided_gradients_do_not_overflow():
    """Their sum is beyond float32, their mean is not."""
    assert np.isinf(after_one_step(2.5e38)).all()
    predivided = after_one_step(2.5e38, gradient_predivide_factor=float(tfscale.size()))
    np.testing.assert_allclose(predivided, -2.5e38, rtol=1e-6)


def n_messages(**options: object) -> int:
    optimizer = DistributedOptimizer(SGD(0.1), **options)
    runtime.backend().take_events()
    run(optimizer, 1.0, steps=1)
    return sum(e.plan >= 0 and e.slot >= 0 for e in runtime.backend().take_events())


@engine_only("its events are counted")
@sizes(2)
def case_numbers_of_groups_are_numbers_of_messages():
    for number, expected in ((1, 1), (2, 2), (4, 4), (99, 4)):
        assert n_messages(num_groups=number) == expected, number
        assert n_messages(groups=number) == expected, number
    assert n_messages(exchange=tfscale.Allreduce(bucket_mb=0)) == 4
    assert n_messages(exchange=tfscale.Allreduce(bucket_mb=1)) == 1


def case_scaled_gradients_are_reduced_then_unscaled_then_clipped():
    """One process with the mean gradients: clipping them while scaled would shorten all of them."""

    def scaled() -> keras.optimizers.Optimizer:
        inner = SGD(0.1, momentum=0.9, global_clipnorm=2.0)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)

    check(scaled)
    unclipped = SGD(0.1, momentum=0.9)
    loose = keras.optimizers.LossScaleOptimizer(unclipped, initial_scale=4.0)
    shortened = values_of(run(scaled(), mean_factor()))
    assert any(
        not np.allclose(one, other)
        for one, other in zip(shortened, values_of(run(loose, mean_factor())), strict=True)
    )
