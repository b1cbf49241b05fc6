"""Around the steps of `fit`: overlap, delays, stopping, and data that runs out."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import StopAt, require_equal_ranks
from tests.helpers.spawn import engine_only, sizes
from tests.parallel.callback_models import compiled, functional, own
from tests.parallel.cases_local_sgd import agree
from tfscale.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from tfscale.comm import runtime
from tfscale.config import ExchangeError


def callbacks() -> list[keras.callbacks.Callback]:
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]


def small_model(**options) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, loss="mse", **options)
    return model


def samples(n: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(n, 4)), generator.normal(size=(n, 1))


def assert_equal_on_all_ranks(values) -> None:
    for other in tfscale.allgather_object(values):
        np.testing.assert_equal(other, values)


def weights(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


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
    runtime.backend().take_events()
    n_started, n_ended = [], []
    for _ in range(8):
        model.train_on_batch(x, x)
        events = [e for e in runtime.backend().take_events() if e.plan >= 0 and e.slot >= 0]
        assert len(events) == 6
        last_ready = max(e.posted_ns for e in events)
        n_started.append(sum(e.started_ns < last_ready for e in events))
        n_ended.append(sum(e.ended_ns < last_ready for e in events))
    # On a machine that has other things to do, not in every step.
    assert sum(n >= 4 for n in n_started) >= 3, (n_started, n_ended)
    assert max(n_ended) >= 1, (n_started, n_ended)


def stop_somewhere(stop: StopAt, expected_steps: int, **options) -> None:
    model = small_model(**options)
    x, y = samples(60)
    data = tfscale.data.GlobalBatches(x, y, batch_size=12, seed=1)
    average = hvd.callbacks.MetricAverageCallback()
    for order in ([*callbacks(), average, stop], [stop, *callbacks(), average]):
        before = int(model.optimizer.iterations)
        model.fit(data, epochs=4, verbose=0, callbacks=order)
        assert int(model.optimizer.iterations) - before == expected_steps
        assert_equal_on_all_ranks(weights(model))


@sizes(2, 3, 4, timeout_s=200)
def case_one_rank_stops_within_an_epoch_or_at_its_end():
    stop_somewhere(StopAt(2), expected_steps=5 + 3)
    stop_somewhere(StopAt(), expected_steps=10)


@sizes(2, 3, timeout_s=120)
def case_one_rank_stops_while_running_eagerly():
    stop_somewhere(StopAt(2), expected_steps=5 + 3, run_eagerly=True)
    stop_somewhere(StopAt(), expected_steps=10, run_eagerly=True)
    tf.config.run_functions_eagerly(True)
    try:
        stop_somewhere(StopAt(2), expected_steps=5 + 3)
    finally:
        tf.config.run_functions_eagerly(False)


@sizes(2, 3)
def case_terminate_on_nan():
    """The loss of one rank is NaN in its third batch: all stop after the same step."""
    model = small_model()
    x, y = samples(20)
    if runtime.rank() == 0:
        y[8] = np.nan
    model.fit(
        x,
        y,
        batch_size=4,
        shuffle=False,
        verbose=0,
        epochs=2,
        callbacks=[
            keras.callbacks.TerminateOnNaN(),
            hvd.callbacks.BroadcastGlobalVariablesCallback(0, consistency_check=False),
        ],
    )
    steps = int(model.optimizer.iterations)
    assert_equal_on_all_ranks(steps)
    assert 3 <= steps <= 5, steps  # of ten


@sizes(2, 3)
def case_data_of_unknown_length_runs_out():
    """The others (without marks all) get a text that names the rank; the next fit is whole."""
    n_batches = 3 if runtime.rank() == 0 else 5

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
        assert runtime.rank() > 0 or not runtime.backend().has_marks
        assert "rank 0 ended its epoch after step 3" in str(error), error
    else:
        assert runtime.rank() == 0
    again = small_model()
    again.fit(*samples(8), batch_size=4, verbose=0, callbacks=callbacks())
    assert_equal_on_all_ranks(weights(again))


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
        model.fit(data, epochs=epochs, verbose=0, callbacks=[*first, StopAt(batch)])
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
            model.fit(data, epochs=4, verbose=0, callbacks=[*first, StopAt(batch)])
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
    model.fit(_batches(), epochs=4, verbose=0, callbacks=[*first, StopAt(), Test()])
    assert tfscale.allgather_object(results) == [results] * tfscale.size()
    kept = model.evaluate(*own(), verbose=0, callbacks=[MetricAverageCallback()], return_dict=True)
    assert tfscale.allgather_object(kept) == [kept] * tfscale.size()


N_BATCHES = 6


class Seen(StopAt):
    def __init__(self, batch):
        super().__init__(batch)
        self.seen = []

    def on_test_begin(self, logs=None):
        self.seen.append([v.numpy() for v in self.model.weights])


def data():
    random = np.random.default_rng(tfscale.rank())
    x = random.normal(size=(4 * N_BATCHES, 2)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)


@sizes(2, 3, timeout_s=200)
def case_one_rank_stops_amid_an_epoch():
    """In a batch before the last ones, in the one before the last, in the last one."""
    n = tfscale.size()
    exchanges = ("allreduce", tfscale.Sharded(), tfscale.LocalSGD(n, 4, "allreduce"))
    for exchange in exchanges:
        for batch in (1, N_BATCHES - 2, N_BATCHES - 1):
            for given in (data(), data().filter(lambda x, y: True)):
                keras.utils.set_random_seed(3)
                layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
                model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
                optimizer = tfscale.DistributedOptimizer(
                    keras.optimizers.SGD(0.1), exchange=exchange
                )
                model.compile(optimizer, "mse")
                stops = Seen(batch)
                start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
                model.fit(
                    given,
                    validation_data=data(),
                    epochs=4,
                    verbose=0,
                    callbacks=[start, hvd.callbacks.MetricAverageCallback(), stops],
                )
                # Ranks that begin a third epoch give it up, alone with themselves.
                assert stops.epochs[-1] <= 2, (exchange, batch, stops.epochs)
                assert all(agree(w) for seen in stops.seen[:2] for w in seen), (exchange, batch)
                assert all(agree(v.numpy()) for v in model.weights), (exchange, batch)
