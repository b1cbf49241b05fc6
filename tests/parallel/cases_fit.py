"""Around the steps of `fit`: overlap, delays, stopping, and data that runs out."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import engine_only, sizes
from tests.helpers.models import functional
from tests.helpers.ranks import StopAt
from tests.parallel.fit_model import (
    assert_equal_on_all_ranks,
    callbacks,
    compiled,
    own,
    samples,
    weights,
)
from tests.parallel.local_sgd_reference import agree
from tfscale.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from tfscale.config import ExchangeError
from tfscale.testing import inspect, require_equal_ranks


def small_model(**options) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, loss="mse", **options)
    return model


@engine_only("its events are looked at")
@sizes(2, timeout_s=120)
def case_buckets_travel_during_back_propagation():
    """Six layers, a bucket each: four have started before the last gradient is ready."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(768, use_bias=False) for _ in range(6)]
    model = keras.Sequential([keras.Input((768,)), *layers])
    optimizer = keras.optimizers.SGD(1e-3)
    model.compile(
        hvd.DistributedOptimizer(optimizer, exchange=tfscale.Allreduce(bucket_mb=0)), loss="mse"
    )
    x = np.random.default_rng(0).normal(size=(1024, 768)).astype("float32")
    model.train_on_batch(x, x)
    inspect.take_collectives()
    n_started, n_ended = [], []
    for _ in range(8):
        model.train_on_batch(x, x)
        events = [e for e in inspect.take_collectives() if e.plan >= 0 and e.slot >= 0]
        assert len(events) == 6
        last_ready = max(e.posted_ns for e in events)
        n_started.append(sum(e.started_ns < last_ready for e in events))
        n_ended.append(sum(e.ended_ns < last_ready for e in events))
    # On a machine that has other things to do, not in every step.
    assert sum(n >= 4 for n in n_started) >= 3, (n_started, n_ended)
    assert max(n_ended) >= 1, (n_started, n_ended)


def stop_everywhere(**options) -> None:
    """In mid-epoch, in its last batch and at its end, whatever comes first in the list."""
    model = small_model(**options)
    data = tfscale.data.GlobalBatches(*samples(60), batch_size=12, seed=1)
    average = hvd.callbacks.MetricAverageCallback()
    for batch, n_steps in ((2, 5 + 3), (4, 10), (None, 10)):
        stop = StopAt(batch)
        for order in ([*callbacks(), average, stop], [stop, *callbacks(), average]):
            before = int(model.optimizer.iterations)
            model.fit(data, epochs=4, verbose=0, callbacks=order)
            assert int(model.optimizer.iterations) - before == n_steps
            assert_equal_on_all_ranks(weights(model))
    model.fit(data, verbose=0, callbacks=callbacks())
    assert_equal_on_all_ranks([data.epoch, *weights(model)])


@sizes(2, 3, 4, timeout_s=200)
def case_one_rank_stops_within_an_epoch_or_at_its_end():
    stop_everywhere()


@engine_only("others ask before each step")
@sizes(2, 3, timeout_s=120)
def case_a_fit_without_callbacks_follows_one_that_stopped():
    """Also where callbacks of the first one are kept, and steps outside of `fit`."""
    model, data = small_model(), tfscale.data.GlobalBatches(*samples(60), batch_size=12, seed=1)
    first = callbacks()
    for kept in (first, None):
        model.fit(data, epochs=4, verbose=0, callbacks=[*(kept or callbacks()), StopAt(2)])
        before = int(model.optimizer.iterations)
        model.fit(data, epochs=2, verbose=0)
        assert int(model.optimizer.iterations) - before == 10
        model.fit(data, epochs=4, verbose=0, callbacks=[*(kept or callbacks()), StopAt(2)])
        model.train_on_batch(*(a[:4] for a in samples(60)))
        model.fit(data, verbose=0)
        assert int(model.optimizer.iterations) - before == 10 + 8 + 1 + 5
        assert_equal_on_all_ranks(weights(model))


@sizes(2, 3, timeout_s=120)
def case_one_rank_stops_while_running_eagerly():
    stop_everywhere(run_eagerly=True)
    tf.config.run_functions_eagerly(True)
    try:
        stop_everywhere()
    finally:
        tf.config.run_functions_eagerly(False)


@sizes(2, 3)
def case_terminate_on_nan():
    """The loss of one rank is NaN in its third batch: all stop after the same step."""
    model = small_model()
    x, y = samples(20)
    if tfscale.rank() == 0:
        y[8] = np.nan
    start = BroadcastGlobalVariablesCallback(0, consistency_check=False)
    first = [keras.callbacks.TerminateOnNaN(), start]
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, epochs=2, callbacks=first)
    steps = int(model.optimizer.iterations)
    assert_equal_on_all_ranks(steps)
    assert 3 <= steps <= 5, steps  # of ten


@sizes(2, 3)
def case_data_of_unknown_length_runs_out():
    """The others (without marks all) get a text that names the rank; the next fit is whole."""
    n_batches = 3 if tfscale.rank() == 0 else 5

    def batches():
        for _ in range(n_batches):
            yield np.ones((2, 4)), np.ones((2, 1))

    signature = (tf.TensorSpec((2, 4)), tf.TensorSpec((2, 1)))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    model = small_model()
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, consistency_check=False)
    start.companions.clear()
    try:
        model.fit(data, verbose=0, callbacks=[start])
    except ExchangeError as error:
        assert tfscale.rank() > 0 or inspect.backend_name() == "horovod"
        assert "rank 0 ended its epoch after step 3" in str(error), error
    else:
        assert tfscale.rank() == 0
    again = small_model()
    again.fit(*samples(8), batch_size=4, verbose=0, callbacks=callbacks())
    assert_equal_on_all_ranks(weights(again))


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
    data = tfscale.data.GlobalBatches(*tfscale.broadcast_object(own(24), 0), batch_size=12)
    model.fit(data, epochs=4, verbose=0, callbacks=[*first, StopAt(), Test()])
    assert tfscale.allgather_object(results) == [results] * tfscale.size()
    kept = model.evaluate(*own(), verbose=0, callbacks=[MetricAverageCallback()], return_dict=True)
    assert tfscale.allgather_object(kept) == [kept] * tfscale.size()


N_BATCHES = 6  # of an epoch


class Seen(StopAt):
    def __init__(self, batch):
        super().__init__(batch)
        self.seen = []

    def on_test_begin(self, logs=None):
        self.seen.append([v.numpy() for v in self.model.weights])


def arrays(seed: int, n_ranks: int = 1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(4 * N_BATCHES * n_ranks, 2)).astype("float32")
    return x, x[:, :1]


@sizes(2, 3, timeout_s=200)
def case_one_rank_stops_amid_an_epoch():
    """In a batch before the last ones, the one before the last, the last one, and at the end.

    The next `fit`, steps outside of it and functions of one's own then continue together.
    """
    n, own_arrays = tfscale.size(), arrays(tfscale.rank())
    total = tf.function(lambda: tfscale.allreduce(tf.ones(2), op=tfscale.Sum))
    own_data = tf.data.Dataset.from_tensor_slices(own_arrays).batch(4)
    first = [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
    for exchange in ("allreduce", tfscale.Sharded(), tfscale.LocalSGD(n, 4, "allreduce")):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
        model.compile(optimizer, "mse")
        shared = tfscale.data.GlobalBatches(*arrays(9, n), batch_size=4 * n)
        for batch, epochs in ((1, 4), (4, 4), (5, 4), (5, 2), (None, 4)):
            unknown = [own_data.filter(lambda x, y: True)] if exchange == "allreduce" else []
            for given in (own_data, shared, *unknown):
                where, stops = (exchange, batch, epochs, given), Seen(batch)
                options = {"validation_data": own_data, "epochs": epochs, "verbose": 0}
                model.fit(given, **options, callbacks=[*first, stops])
                # Ranks that begin a third epoch give it up, alone with themselves.
                assert stops.epochs[-1] <= 2, (where, stops.epochs)
                assert all(agree(w) for seen in stops.seen[:2] for w in seen), where
                assert all(agree(v.numpy()) for v in model.weights), where
            before = int(model.optimizer.iterations)
            for _ in range(2):
                model.train_on_batch(*(a[:4] for a in own_arrays))
                np.testing.assert_array_equal(total(), [n] * 2)
            assert int(model.optimizer.iterations) == before + 2
            if not isinstance(exchange, tfscale.LocalSGD):
                require_equal_ranks(model.trainable_variables)
        model.fit(shared, verbose=0, callbacks=first)
        assert_equal_on_all_ranks(shared.epoch)
