"""Errors of callbacks on all ranks, stopping, and checkpoints."""

from __future__ import annotations

import os

import keras
import numpy as np
from keras.optimizers import SGD

import tfscale
from tests.helpers.ranks import StopAt, require_equal_ranks, require_identical, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.callback_models import compiled, fit, functional, own, require_error_everywhere
from tfscale import DistributedOptimizer
from tfscale.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    ConsistencyCheck,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    ModelCheckpoint,
    RankZero,
)


@sizes(2, 3, 4)
def case_a_metric_key_of_one_rank_is_an_error_on_all():
    model = compiled(functional())
    validation = own() if tfscale.rank() == 1 else None
    require_error_everywhere(
        lambda: fit(model, own(), [MetricAverageCallback()], validation_data=validation),
        "'val_loss' on ranks [1] only",
    )


@sizes(2, 3, 4)
def case_weights_that_drift_apart_are_named():
    keras.utils.set_random_seed(2)
    model = functional(has_statistics=False)
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    others = list(range(1, tfscale.size()))
    require_error_everywhere(
        lambda: fit(model, own(), [ConsistencyCheck()]), f"'hidden/kernel' on ranks {others}"
    )


class NoteUpdates(ConsistencyCheck):
    """Notes whether there was an update before the first check."""

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.before, self.noted = self.model.get_weights()[0], []

    def check(self, moment):
        self.noted.append((moment, bool((self.model.get_weights()[0] != self.before).any())))
        super().check(moment)


@sizes(2, 3)
def case_the_first_update_is_awaited_where_batches_are_added_up():
    for passes, inner in ((4, SGD(0.1)), (1, SGD(0.1, gradient_accumulation_steps=4))):
        model = functional(has_statistics=False)
        optimizer = DistributedOptimizer(inner, backward_passes_per_step=passes)
        model.compile(optimizer, "binary_crossentropy")
        begin, check = BroadcastGlobalVariablesCallback(0), NoteUpdates()
        fit(model, own(), [begin, check], epochs=1, batch_size=1)
        assert check.noted == [("after the first update", True), ("at the end of epoch 1", True)]


def case_rank_zero_stops_all_ranks():
    model = compiled(functional())
    first = [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
    history = fit(model, own(), [*first, RankZero(StopAt(rank=0))], epochs=6)
    losses = tfscale.allgather_object(history["loss"])
    assert len(losses[0]) == 2 and {len(item) for item in losses} <= {2, 3}, losses
    for item in losses:
        assert item[:2] == losses[0] and item[-1] == losses[0][-1]
    require_equal_ranks(model.weights)
    fit(model, own(), first)


def case_checkpoints_of_all_ranks():
    with shared_folder() as folder:
        names = ["plain", "ours", "best"]
        plain, ours, best = (os.path.join(folder, name, "model.keras") for name in names)
        model = compiled(functional())
        callbacks = [
            BroadcastGlobalVariablesCallback(0),
            MetricAverageCallback(),
            keras.callbacks.ModelCheckpoint(plain),
            ModelCheckpoint(ours),
            BestModelCheckpoint("loss", filepath=best),
        ]
        fit(model, own(), callbacks, epochs=3)
        tfscale.barrier()
        for name, path in zip(names, (plain, ours, best), strict=True):
            assert os.listdir(os.path.join(folder, name)) == ["model.keras"]
            saved = keras.models.load_model(path)
            if name != "best":
                require_identical(model.get_weights(), saved.get_weights())


def case_warmup_with_momentum_keeps_ranks_equal():
    keras.utils.set_random_seed(tfscale.rank())
    model = compiled(functional())
    rates = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    size = tfscale.size()
    warmup = LearningRateWarmupCallback(0.4, warmup_epochs=2)
    fit(model, own(), [BroadcastGlobalVariablesCallback(0), warmup, Look()], epochs=3)
    reached = np.minimum(np.arange(1, 7) / 2, 2.0)
    np.testing.assert_allclose(rates, 0.4 / size * (reached * (size - 1) / 2 + 1), rtol=1e-6)
    require_equal_ranks(model.weights)
