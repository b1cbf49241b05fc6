"""Collectives of ranks after a stop, and data that differs between ranks."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.spawn import sizes
from tests.parallel.callback_models import (
    compiled,
    functional,
    own,
    require_equal_ranks,
    require_error_everywhere,
)
from tfscale.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from tfscale.config import ConfigError


class _StopsAt(keras.callbacks.Callback):
    """Stops on the last rank, in a batch of the second epoch or at its end."""

    def __init__(self, batch=None):
        super().__init__()
        self.batch, self.epoch = batch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._stop(batch)

    def on_epoch_end(self, epoch, logs=None):
        self._stop(None)

    def _stop(self, batch):
        if tfscale.rank() == tfscale.size() - 1 and (self.epoch, batch) == (1, self.batch):
            self.model.stop_training = True


def _batches(n=24, **options):
    x, y = own(n)  # the same on all ranks: shared out by GlobalBatches
    x, y = tfscale.broadcast_object((x, y), 0)
    return tfscale.data.GlobalBatches(x, y, batch_size=12, **options)


@sizes(2, 3)
def case_data_that_a_rank_stopped_reading_in_its_last_batch_trains_again():
    for batch, epochs, eager in (
        (0, 4, False),
        (1, 4, False),
        (None, 4, False),
        (1, 2, True),
        (1, 2, False),
    ):
        data, model = _batches(), compiled(functional())
        model.run_eagerly = eager
        first = [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
        model.fit(data, epochs=epochs, verbose=0, callbacks=[*first, _StopsAt(batch)])
        model.fit(data, epochs=1, verbose=0, callbacks=first)
        require_equal_ranks(model.weights)
        numbers = tfscale.allgather_object(data.epoch)
        assert set(numbers) == {numbers[0]}, numbers


@sizes(2, 3)
def case_steps_and_functions_outside_of_fit_go_on_together():
    exchanges = ("allreduce", tfscale.Sharded(), tfscale.LocalSGD(tfscale.size(), interval=2))
    for exchange in exchanges:
        for batch in (0, 1, None):
            data, model = _batches(), functional(has_statistics=False)
            optimizer = tfscale.DistributedOptimizer(keras.optimizers.Adam(), exchange=exchange)
            model.compile(optimizer, "mse")
            first = [BroadcastGlobalVariablesCallback(0)]
            model.fit(data, epochs=4, verbose=0, callbacks=[*first, _StopsAt(batch)])
            before = int(model.optimizer.iterations)
            total = tf.function(lambda: tfscale.allreduce(tf.ones(2), op=tfscale.Sum))
            for _ in range(2):
                model.train_on_batch(*own(4))
                np.testing.assert_array_equal(total(), [tfscale.size()] * 2)
            assert int(model.optimizer.iterations) == before + 2
            if not isinstance(exchange, tfscale.LocalSGD):
                require_equal_ranks(model.trainable_variables)
            model.fit(data, epochs=1, verbose=0, callbacks=first)


@sizes(2, 3)
def case_evaluations_within_an_epoch_that_does_not_count():
    """A rank that still runs it has none to average with: the last rank has left `fit`."""

    class Test(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            average = [MetricAverageCallback()]
            return self.model.evaluate(*own(), verbose=0, callbacks=average, return_dict=True)

        def on_train_end(self, logs=None):
            results.append(self.on_epoch_end(0))

    results = []
    model = compiled(functional())
    first = [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
    model.fit(_batches(), epochs=4, verbose=0, callbacks=[*first, _StopsAt(), Test()])
    assert tfscale.allgather_object(results) == [results] * tfscale.size()
    kept = model.evaluate(*own(), verbose=0, callbacks=[MetricAverageCallback()], return_dict=True)
    assert tfscale.allgather_object(kept) == [kept] * tfscale.size()


@sizes(2)
def case_a_last_batch_for_one_rank_only_says_what_to_do():
    data = _batches(n=13, shuffle=False, drop_remainder=False)
    try:
        compiled(functional()).fit(data, callbacks=[BroadcastGlobalVariablesCallback(0)])
    except ConfigError as error:
        assert "drop_remainder" in str(error), error
    else:
        raise AssertionError("no error")


@sizes(2, 3)
def case_shares_instead_of_all_samples_are_refused():
    x, y = own(24)
    x = x + tfscale.rank()
    data = tfscale.data.GlobalBatches(x, y, batch_size=12)
    require_error_everywhere(
        lambda: compiled(functional()).fit(data, callbacks=[BroadcastGlobalVariablesCallback(0)]),
        "all samples in the same order",
    )
