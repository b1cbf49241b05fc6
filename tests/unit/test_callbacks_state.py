"""Broadcast, consistency check and non-trainable state, with ranks played by threads."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401
from tests.unit.callback_models import (
    Deferred,
    FirstWeights,
    compiled,
    data,
    fit,
    functional,
    snapshot,
)
from tfscale.callbacks import (
    BroadcastGlobalVariablesCallback,
    ConsistencyCheck,
)
from tfscale.config import ExchangeError


@pytest.mark.parametrize("kind", [functional, Deferred])
def test_all_ranks_start_from_the_last_rank(kind):
    models = []
    for rank in range(3):
        keras.utils.set_random_seed(rank)
        models.append(compiled(kind(), rate=0.1 * (rank + 1)))
    if kind is functional:
        fit(models[2], [])  # this rank has optimizer slots and moving statistics already
    records = [FirstWeights() for _ in models]

    def body(rank):
        # The record comes first, so that its step runs inside the callback's.
        callbacks = [records[rank], BroadcastGlobalVariablesCallback(2, consistency_check=False)]
        fit(models[rank], callbacks, seed=0)
        return snapshot(models[rank])

    trained = FakeRanks(3).run(body)
    assert not [result for result in trained if isinstance(result, Exception)], trained
    for rank in range(3):
        assert len(records[rank].seen) == 8 + 2 + 4 + 2
        for mine, root in zip(records[rank].seen, records[2].seen, strict=True):
            np.testing.assert_array_equal(mine, root)
        for mine, root in zip(trained[rank], trained[2], strict=True):
            np.testing.assert_array_equal(mine, root)
    rate = float(models[0].optimizer.learning_rate.numpy())
    assert rate == pytest.approx(0.3)


def test_local_variables_and_their_slots_are_left_alone():
    models = []
    for rank in range(2):
        keras.utils.set_random_seed(rank)
        models.append(compiled(functional()))
        fit(models[rank], [], seed=rank)
    local = [model.get_layer("hidden").trainable_variables for model in models]
    slots = [models[rank].optimizer.momentums[0].numpy() for rank in range(2)]

    def body(rank):
        model = models[rank]
        callback = BroadcastGlobalVariablesCallback(1, local_variables=local[rank])
        callback.set_model(model)
        callback.on_train_begin()
        return [v.numpy() for v in model.trainable_variables], model.optimizer.momentums

    (first, first_slots), (second, second_slots) = FakeRanks(2).run(body)
    assert not np.array_equal(first[0], second[0])
    for mine, root in zip(first[2:], second[2:], strict=True):
        np.testing.assert_array_equal(mine, root)
    np.testing.assert_array_equal(first_slots[0].numpy(), slots[0])
    np.testing.assert_array_equal(first_slots[-1].numpy(), second_slots[-1].numpy())
    assert not np.array_equal(slots[0], slots[1])


def test_different_models_are_an_error_on_all_ranks():
    models = [compiled(Deferred(units)) for units in (2, 3)]
    for model in models:
        model(data(0)[0])

    for error in FakeRanks(2).run(
        lambda rank: fit(models[rank], [BroadcastGlobalVariablesCallback(0)])
    ):
        assert isinstance(error, ExchangeError)
        assert "(3, 2)" in str(error) and "(3, 3) float32 trainable=True on rank 1" in str(error)


def test_consistency_check_names_variable_and_ranks():
    models = []
    for _ in range(3):
        keras.utils.set_random_seed(1)
        models.append(compiled(functional()))

    class Disturb(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.optimizer.learning_rate = 0.05

    def body(rank):
        callbacks = [BroadcastGlobalVariablesCallback(0)] + [Disturb()] * (rank == 2)
        fit(models[rank], callbacks, seed=0, epochs=3)

    for error in FakeRanks(3).run(body):
        assert isinstance(error, ExchangeError)
        text = str(error)
        assert "at the end of epoch 2" in text and "'hidden/kernel' on ranks [2]" in text
        assert "more variables" in text


def test_consistency_check_after_the_first_update():
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        models.append(compiled(functional()))
    steps = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    def body(rank):
        fit(models[rank], [Count(), ConsistencyCheck()], seed=rank)

    for error in FakeRanks(2).run(body):
        assert isinstance(error, ExchangeError) and "after the first update" in str(error)
    assert steps == [0, 0]


def test_groups_compare_within_groups_only():
    models = [compiled(functional()) for _ in range(4)]
    for rank, model in enumerate(models):
        model.set_weights([np.full(w.shape, float(rank // 2)) for w in model.weights])

    def check(groups):
        def body(rank):
            callback = ConsistencyCheck(groups=groups)
            callback.set_model(models[rank])
            callback.check("now")

        return FakeRanks(4).run(body)

    assert check([(0, 1), (2, 3)]) == [None] * 4
    assert all("on ranks [2, 3]" in str(error) for error in check(None))
    assert all("on ranks [2, 3]" in str(error) for error in check([(0, 2), (1, 3)]))
