"""The distance between groups of local SGD: from the mean of their models, against NumPy."""

from __future__ import annotations

import keras
import numpy as np

import tfscale
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import OPTIMIZERS, dense_model, float64
from tests.parallel.cases_local_sgd import agree, train
from tests.parallel.local_sgd_reference import (
    BATCH,
    STEPS,
    distance_by_hand,
    mean_of,
    models_for,
    own_part,
    samples,
    set_all,
)
from tfscale.callbacks import BroadcastGlobalVariablesCallback, ModelDistance

GROUPS = 2


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def by_hand(interval):
    """Return the distance before each step of an outer optimizer; groups train with SGD."""
    rule, (x, y) = outer(), samples()
    models = models_for(GROUPS, OPTIMIZERS["sgd"])
    common = [keras.Variable(v.numpy(), dtype="float64") for v in models[0].trainable_variables]
    found = []
    for step in range(STEPS):
        for i, model in enumerate(models):
            own = own_part(step, i, GROUPS)
            model.train_on_batch(x[own], y[own])
        if (step + 1) % interval:
            continue
        mean = mean_of([m.trainable_variables for m in models])
        found.append(np.mean([distance(m.trainable_variables, mean) for m in models]))
        rule.apply([v.value - m for v, m in zip(common, mean, strict=True)], common)
        set_all(models, [v.numpy() for v in common])
    return found


def distance(variables, mean):
    squares = [np.sum((v.numpy() - m) ** 2) for v, m in zip(variables, mean, strict=True)]
    return np.sqrt(np.sum(squares))


def within():
    return ("allreduce", tfscale.Sharded()) if tfscale.size() > 2 else ("allreduce",)


@sizes(2, 4, timeout_s=120)
def case_an_outer_optimizer_does_not_count():
    with float64():
        expected = by_hand(interval=2)
        for inside in within():
            record = ModelDistance()
            strategy = tfscale.LocalSGD(GROUPS, 2, inside, outer=outer())
            train(OPTIMIZERS["sgd"], strategy, callbacks=[record])
            assert [step for step, _ in record.distances] == [2, 4, 6, 8, 10]
            assert agree([d for _, d in record.distances])
            np.testing.assert_allclose([d for _, d in record.distances], expected, rtol=1e-9)


@sizes(2, timeout_s=120)
def case_averaged_gradients_of_sgd():
    """If models are not averaged, all ranks continue with values that equal the mean under SGD."""
    with float64():
        record = ModelDistance()
        strategy = tfscale.LocalSGD(GROUPS, 5, average="gradients")
        train(OPTIMIZERS["sgd"], strategy, callbacks=[record])
        np.testing.assert_allclose(record.distances[0][1], distance_by_hand(5), rtol=1e-9)


@sizes(2, 4, timeout_s=120)
def case_equal_groups_are_no_distance_apart():
    """Both groups get the same samples."""
    x, y = (a.reshape(-1, BATCH // GROUPS, a.shape[-1])[::2] for a in samples())
    x, y = (np.tile(a, (1, GROUPS, 1)).reshape(-1, a.shape[-1]) for a in (x, y))
    with float64():
        for inside in within():
            keras.utils.set_random_seed(3)
            model = dense_model()
            strategy = tfscale.LocalSGD(GROUPS, 3, inside, outer=outer())
            rule = OPTIMIZERS["sgd"]()
            model.compile(tfscale.DistributedOptimizer(rule, exchange=strategy), "mse")
            data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
            start, record = BroadcastGlobalVariablesCallback(0), ModelDistance()
            model.fit(data, epochs=2, verbose=0, callbacks=[start, record])
            assert [step for step, _ in record.distances] == [3, 6, 9, 12, 15, 18]
            np.testing.assert_allclose([d for _, d in record.distances], 0.0, atol=1e-12)


class Logged(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.distances = []

    def on_epoch_end(self, epoch, logs=None):
        self.distances.append(logs.get("model_distance"))


@sizes(2, timeout_s=60)
def case_an_epoch_without_an_average_logs_none():
    """Ten steps in an epoch, averages after 15 and 30."""
    record, logged = ModelDistance(), Logged()
    train(OPTIMIZERS["sgd"], tfscale.LocalSGD(GROUPS, 15), 4, callbacks=[record, logged])
    (_, first), (_, second) = record.distances
    assert logged.distances == [None, first, second, None]
