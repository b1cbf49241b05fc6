"""Metrics whose result is an array, over ranks."""

import keras
import numpy as np

from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401
from tests.unit.test_callbacks_metric_average import Recorder, in_two, shares
from tfscale.callbacks import MetricAverageCallback

SHARES = (6, 14, 4)


def data(samples, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 3)).astype("float32"), np.eye(3)[rng.integers(0, 3, samples)]


def model():
    keras.utils.set_random_seed(2)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="softmax")])
    metrics = [keras.metrics.F1Score(average=None, name="f1"), "accuracy"]
    made.compile(keras.optimizers.SGD(0.0), "categorical_crossentropy", metrics=metrics)
    return made


class Adds(keras.callbacks.Callback):
    """Adds an array that no metric made."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        logs["own"] = np.full(3, float(self.rank))


def fit(made, train, validation, callbacks):
    options = {"validation_data": validation, "callbacks": callbacks, "verbose": 0}
    return made.fit(in_two(train), epochs=2, **options).history


def test_f1_of_each_class_is_that_of_all_samples():
    train, validation = data(sum(SHARES), 0), data(sum(SHARES), 1)
    one = model()
    expected = fit(one, train, validation, [])
    alone = one.evaluate(*validation, verbose=0)
    parts, validation_parts = shares(train, SHARES), shares(validation, SHARES)
    models, recorders = [model() for _ in SHARES], [Recorder() for _ in SHARES]

    def body(rank):
        average = MetricAverageCallback()
        callbacks = [Adds(rank), average, recorders[rank]]
        history = fit(models[rank], parts[rank], validation_parts[rank], callbacks)
        own = models[rank].evaluate(*validation_parts[rank], verbose=0, callbacks=[average])
        return history, own

    for rank, (history, own) in enumerate(FakeRanks(3).run(body)):
        for key, values in expected.items():
            np.testing.assert_allclose(history[key], values, rtol=5e-6, err_msg=key)
        for key in ("f1", "val_f1"):
            assert np.shape(history[key]) == (2, 3)
            np.testing.assert_array_equal(recorders[rank].logs[key], history[key][-1])
        for mine, wanted in zip(own, alone, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=5e-6)
        np.testing.assert_array_equal(history["own"], np.full((2, 3), float(rank)))
