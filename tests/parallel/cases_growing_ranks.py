"""Ranks that join as the batch grows: losses of sequences, fits that follow, what is refused."""

from __future__ import annotations

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import require_close, require_equal_ranks, require_error
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import float64
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    ParameterAveraging,
)
from tfscale.data.slices import epoch_order

SAMPLES, STEPS, RATE = 48, 5, 0.0625
SIZES = (2, 4, 8)


def arrays():
    random = np.random.default_rng(3)
    return random.normal(size=(SAMPLES, STEPS, 3)), random.integers(0, 4, (SAMPLES, STEPS))


def compiled(wrap=tfscale.DistributedOptimizer):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((STEPS, 3)), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(keras.optimizers.SGD(RATE)), loss)
    return model


def make_data():
    return tfscale.data.GlobalBatches(*arrays(), batch_size=24, seed=7)


def fit(model, data, *more):
    """Train with a fresh callback whose batch doubles after each epoch."""
    growth = {"interval": 1, "momentum_correction": False, "log_path": None}
    callbacks = [
        BroadcastGlobalVariablesCallback(0),
        MetricAverageCallback(),
        AdaptiveBatchSize(
            data, SIZES[-1], start_batch_size=SIZES[0], active_ranks="grow", **growth
        ),
        *more,
    ]
    return model.fit(data, epochs=len(SIZES), verbose=0, callbacks=callbacks).history


def by_hand(n_fits):
    """Train one plain model; the rate grows with the batch, from where the fit before left it."""
    model = compiled(wrap=lambda optimizer: optimizer)
    x, y = arrays()
    rate = RATE
    for epoch in range(n_fits * len(SIZES)):
        size = SIZES[epoch % len(SIZES)]
        model.optimizer.learning_rate = rate * size / SIZES[0]
        for rows in epoch_order(7, epoch, SAMPLES).reshape(-1, size):
            model.train_on_batch(x[rows], y[rows])
        if size == SIZES[-1]:
            rate *= SIZES[-1] / SIZES[0]
    return model


@sizes(1, 2, 3, 4, timeout_s=120)
def case_losses_of_sequences_equal_one_process_in_each_fit():
    with float64():
        model, data = compiled(), make_data()
        for n_fits in (1, 2):
            history = fit(model, data)
            assert tuple(history["batch_size"]) == SIZES
            assert data.batch_size == 24 and len(data[0]) == 2
            alone = by_hand(n_fits)
            require_close(model.get_weights(), alone.get_weights())
        require_equal_ranks(model.variables)


@sizes(2, 4)
def case_exchanges_that_do_not_average_all_ranks_are_refused():
    groups = tfscale.LocalSGD(groups=tfscale.size(), interval=2)
    local = compiled(wrap=lambda o: tfscale.DistributedOptimizer(o, exchange=groups))
    require_error(lambda: fit(local, make_data()), "average in every step", "LocalSGD")
    apart = compiled(wrap=lambda optimizer: optimizer)
    averaging = ParameterAveraging()
    require_error(lambda: fit(apart, make_data(), averaging), "Received: ParameterAveraging")
