"""Averages in few bits, or of few values, that overlap with training; intervals by the rate."""

import contextlib
import random
import time
from dataclasses import replace
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import engine_only, sizes
from tests.helpers.ranks import require_error, values_of
from tests.parallel.local_sgd_reference import train
from tfscale import Compression, DistributedOptimizer, config
from tfscale.testing import require_equal_ranks, require_identical

FEW = {
    "int8": Compression.int8,
    "int4": Compression.int4(start_step=0),
    "sparse": Compression.sparse(share=1 / 16),
}
ENGINE = "Horovod sends no integers of few bits"


def new_model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(48, "tanh") for _ in range(3)]
    return keras.Sequential([keras.Input((32,)), *layers])


def own_batches():
    rng = np.random.default_rng(tfscale.rank())
    return np.float32(rng.normal(size=(2, 4, 32))), np.float32(rng.normal(size=(2, 4, 48)))


@contextlib.contextmanager
def comparing():
    """Averages that are created within compare their digests, as with TFSCALE_COMPARE_AVERAGES."""
    known = replace(config.settings(), compare_averages=True)
    with mock.patch("tfscale.local_sgd.reports.settings", lambda: known):
        yield


def compiled(compression, **options):
    model = new_model()
    local = tfscale.LocalSGD(tfscale.size(), **{"within": "allreduce", **options})
    optimizer = DistributedOptimizer(
        keras.optimizers.Adam(0.01), compression=compression, exchange=local
    )
    model.compile(optimizer, "mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    return model


@engine_only(ENGINE)
@sizes(2, 3, timeout_s=400)
def case_every_average_gives_equal_bits_whatever_its_timing():
    """1000 steps with random delays: ranks compare digests of what each average gives."""
    chance = random.SystemRandom()
    for kind, options, n_steps in (
        ("sparse", {"interval": 4, "fragments": 2, "overlap": 3}, 1000),
        ("int8", {"interval": 4, "fragments": 2, "overlap": 2}, 200),
        ("int4", {"interval": 3, "overlap": 1, "within": tfscale.Sharded(dense="weights")}, 200),
        ("int8", {"interval": 4}, 100),
        ("sparse", {"interval": 2}, 100),
    ):
        with comparing():
            model = compiled(FEW[kind], **options)
        x, y = own_batches()
        for step in range(n_steps):
            if chance.random() < 0.05:
                time.sleep(0.01 * chance.random())  # ranks send and merge at different times
            model.train_on_batch(x[step % 2], y[step % 2])
        average = model.optimizer.bound.average
        n_expected = n_steps // options["interval"]
        assert n_expected - 2 <= int(average.report.n_averages.numpy()) <= n_expected
        assert average.variables  # nothing is under way
        require_equal_ranks(average._common)


@engine_only(ENGINE)
@sizes(2, 3)
def case_an_average_that_differs_ends_the_step():
    """On one rank a bit of the common model is another: all ranks learn of it."""
    for options in ({"interval": 2}, {"interval": 2, "overlap": 1}):
        with comparing():
            model = compiled(Compression.int8, **options)
        (x, _), (y, _) = own_batches()
        for _ in range(3):
            model.train_on_batch(x, y)
        common = model.optimizer.bound.average._common[0]
        if tfscale.rank() == tfscale.size() - 1:
            changed = common.numpy()
            changed.view(np.uint32).flat[7] ^= 1
            common.assign(changed)

        def go_on(model=model, x=x, y=y):
            for _ in range(6):
                model.train_on_batch(x, y)

        require_error(go_on, "An average must give equal bits on ranks 0, 1")


@engine_only(ENGINE)
@sizes(2, 3, timeout_s=200)
def case_a_rank_that_is_late_changes_no_bit():
    """Parameters, residuals, and what is on its way."""
    for kind, options in (
        ("sparse", {"interval": 4, "fragments": 2, "overlap": 3}),
        ("int8", {"interval": 4, "overlap": 2}),
    ):
        results = []
        for late in (0, tfscale.size() - 1):
            model = compiled(FEW[kind], **options)
            x, y = own_batches()
            for step in range(18):
                if tfscale.rank() == late:
                    time.sleep(random.SystemRandom().uniform(0.0, 0.02))  # this rank is late
                model.train_on_batch(x[step % 2], y[step % 2])
            average = model.optimizer.bound.average
            results.append(values_of([*model.trainable_variables, *average.variables]))
            kept = sum(np.abs(v.numpy()).sum() for v in average.residuals.variables)
            assert sum(tfscale.allgather_object(kept)) > 0  # a rank of a host keeps each chunk's
        require_identical(results[1], results[0])


@engine_only(ENGINE)
@sizes(2, 3)
def case_memory_of_residuals_is_reported():
    """4 bytes per value of what is not sent whole; and the owners' parts of quantised means."""
    n_values = 32 * 48 + 2 * 48 * 48
    for kind, extra in (("sparse", 0), ("int8", 4 * n_values // tfscale.size())):
        model = compiled(FEW[kind], interval=4, overlap=3)
        found = model.optimizer.memory_report()["residuals"]
        assert abs(found - 4 * n_values - extra) <= 4 * 3 * 256, (kind, found)


class Intervals(keras.callbacks.Callback):
    """Notes the interval after each step, and the steps after which groups had averaged."""

    def __init__(self):
        super().__init__()
        self.found, self.averaged = [], []

    def on_train_batch_end(self, batch, logs=None):
        average = self.model.optimizer.bound.average
        self.found.append(int(average.interval.numpy()))
        if int(average.since.numpy()) == 0:
            self.averaged.append(len(self.found))


@sizes(2, 3)
def case_an_interval_follows_the_rate():
    """Rising, constant, and falling rates; ten steps an epoch."""
    boundaries, rates = [6, 12, 24], [0.05, 0.1, 0.05, 0.025]

    def make():
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, rates)
        return keras.optimizers.SGD(schedule)

    rule = tfscale.QuadraticInterval(alpha=0.15, minimum=2)
    for options in ({}, {"overlap": 1}):
        seen = Intervals()
        strategy = tfscale.LocalSGD(tfscale.size(), rule, "allreduce", **options)
        train(make, strategy, 5, [seen])
        # At the first average, and where the rate has risen since the last, it is the smallest.
        steps, at, rate_before, expected = 0, [], 0.0, rule.minimum
        while steps + expected <= 50:
            steps += expected
            rate = rates[sum(steps - 1 > boundary for boundary in boundaries)]
            expected = rule.minimum if rate > rate_before else rule.at(rate)
            rate_before = rate
            at.append(steps)
        assert seen.averaged == at, (seen.averaged, at)
        assert max(seen.found) == rule.at(0.025) == 36


@engine_only(ENGINE)
@sizes(2, 3)
def case_eager_steps_average_as_traced_ones_do():
    """Eager steps post averages, too, and wait for them when they merge."""
    results = []
    for is_eager in (False, True):
        model = compiled(FEW["sparse"], interval=2, overlap=1)
        model.run_eagerly = is_eager
        x, y = own_batches()
        for step in range(6):
            model.train_on_batch(x[step % 2], y[step % 2])
        results.append(values_of(model.trainable_variables))
    for eager, traced in zip(*results, strict=True):
        np.testing.assert_allclose(eager, traced, atol=1e-4)
    assert tf.executing_eagerly()
