"""What happens around the steps of `fit`: overlap, delays, stopping, and data that runs out."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.spawn import engine_only, sizes
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


class StopAt(keras.callbacks.Callback):
    """Asks to stop on the last rank only, at a batch or at the end of an epoch."""

    def __init__(self, batch: int | None = None, epoch: int = 0):
        super().__init__()
        self.batch, self.at_epoch, self.epoch = batch, epoch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def _stop(self, is_now: bool) -> None:
        if is_now and self.epoch == self.at_epoch and runtime.rank() == runtime.size() - 1:
            self.model.stop_training = True

    def on_train_batch_end(self, batch, logs=None):
        self._stop(batch == self.batch)

    def on_epoch_end(self, epoch, logs=None):
        self._stop(self.batch is None)


def stop_somewhere(stop: StopAt, expected_steps: int, **options) -> None:
    """Train until one rank stops, then again."""
    model = small_model(**options)
    x, y = samples(60)
    data = tfscale.data.GlobalBatches(x, y, batch_size=12, seed=1)
    average = hvd.callbacks.MetricAverageCallback()
    for order in ([*callbacks(), average, stop], [stop, *callbacks(), average]):
        before = int(model.optimizer.iterations)
        model.fit(data, epochs=4, verbose=0, callbacks=order)
        assert int(model.optimizer.iterations) - before == expected_steps
        assert_equal_on_all_ranks(weights(model))


@sizes(2, 3, 4, timeout_s=120)
def case_one_rank_stops_in_the_middle_of_an_epoch():
    stop_somewhere(StopAt(batch=2, epoch=1), expected_steps=5 + 3)


@sizes(2, 3, timeout_s=120)
def case_one_rank_stops_at_the_end_of_an_epoch():
    stop_somewhere(StopAt(epoch=1), expected_steps=10)


@sizes(2, 3, timeout_s=120)
def case_one_rank_stops_while_running_eagerly():
    stop_somewhere(StopAt(batch=2, epoch=1), expected_steps=5 + 3, run_eagerly=True)
    stop_somewhere(StopAt(epoch=1), expected_steps=10, run_eagerly=True)
    tf.config.run_functions_eagerly(True)
    try:
        stop_somewhere(StopAt(batch=2, epoch=1), expected_steps=5 + 3)
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
def case_different_numbers_of_batches_are_refused():
    model = small_model()
    x, y = samples(40 + 8 * runtime.rank())
    try:
        model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks())
    except ExchangeError as error:
        expected = [5 + r for r in range(runtime.size())]
        assert f"steps={expected}" in str(error), error
        assert "GlobalBatches" in str(error)
    else:
        raise AssertionError("no error")


@sizes(2, 3)
def case_different_global_batches_are_refused():
    """A seed of its own on each rank would serve some samples twice and others never."""
    x, y = samples(40)
    data = tfscale.data.GlobalBatches(
        x[:36], y[:36], batch_size=runtime.size() * 2, seed=runtime.rank()
    )
    try:
        small_model().fit(data, verbose=0, callbacks=callbacks())
    except ExchangeError as error:
        assert "same global batches" in str(error) and "'seed': 1" in str(error), error
    else:
        raise AssertionError("no error")


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
