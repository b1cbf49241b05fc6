"""Broadcast, consistency check and non-trainable state, with ranks played by threads."""

import keras
import numpy as np

from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401
from tests.unit.callback_models import Deferred, compiled, data, fit, functional
from tfscale.callbacks import BroadcastGlobalVariablesCallback, ConsistencyCheck
from tfscale.config import ExchangeError


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
