"""Errors of callbacks on all ranks, stopping, and checkpoints."""

from keras.optimizers import SGD

import tfscale
from tests.helpers.ranks import StopAt, require_equal_ranks
from tests.helpers.spawn import sizes
from tests.parallel.callback_models import compiled, fit, functional, own, require_error_everywhere
from tfscale import DistributedOptimizer
from tfscale.callbacks import (
    BroadcastGlobalVariablesCallback,
    ConsistencyCheck,
    MetricAverageCallback,
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
