"""MetricAverageCallback against one process that sees all samples."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401
from tfscale.callbacks import MetricAverageCallback
from tfscale.config import ConfigError

SHARES = (10, 24, 4)  # samples of each rank, in two batches
VALIDATION_SHARES = (6, 2, 9)


class LargestPrediction(keras.metrics.Metric):
    """A metric whose state is a maximum and does not add."""

    tfscale_reduce = "max"

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self):
        return self.largest + 0.0


def metrics():
    named = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    return ["accuracy", *named, LargestPrediction()]


def data(samples, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 3)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + rng.normal(size=(samples, 1)) > 0).astype("float32")
    return x, y, rng.uniform(0.5, 2.0, samples).astype("float32")


def model_of(compiled_metrics, activity=True):
    keras.utils.set_random_seed(3)
    regularizer = keras.regularizers.L2(0.1) if activity else None
    hidden = keras.layers.Dense(4, activation="tanh", activity_regularizer=regularizer)
    out = keras.layers.Dense(1, activation="sigmoid")
    model = keras.Sequential([keras.Input((3,)), hidden, out])
    weighted = {"weighted_metrics": [keras.metrics.BinaryAccuracy(name="weighted")]}
    loss = "binary_crossentropy"
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=compiled_metrics, **weighted)
    return model


def shares(arrays, sizes):
    ends = np.cumsum(sizes)
    return [[a[end - n : end] for a in arrays] for n, end in zip(sizes, ends, strict=True)]


def in_two(train):
    """Return two batches; those of arrays would have to be of one size on all ranks."""
    train = tuple(part for part in train if part is not None)
    return tf.data.Dataset.from_tensor_slices(train).batch(len(train[0]) // 2)


def fit(model, train, validation, callbacks, epochs=1):
    history = model.fit(
        in_two(train), epochs=epochs, validation_data=validation, callbacks=callbacks, verbose=0
    )
    return history.history


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = None

    def on_train_end(self, logs=None):
        self.logs = dict(logs)


def test_fit_and_evaluate_give_the_metrics_of_one_process():
    train, validation = data(sum(SHARES), 0), data(sum(VALIDATION_SHARES), 1)
    one = model_of(metrics(), activity=False)
    expected = fit(one, train, validation, [])
    expected_alone = one.evaluate(*validation[:2], sample_weight=validation[2], verbose=0)
    parts, validation_parts = shares(train, SHARES), shares(validation, VALIDATION_SHARES)
    models = [model_of(metrics(), activity=False) for _ in SHARES]
    recorders = [Recorder() for _ in SHARES]

    def body(rank):
        model = models[rank]
        average = MetricAverageCallback()
        history = fit(model, parts[rank], validation_parts[rank], [average, recorders[rank]], 2)
        own = {key: float(value) for key, value in model.get_metrics_result().items()}
        x, y, weight = validation_parts[rank]
        alone = model.evaluate(x, y, sample_weight=weight, verbose=0, callbacks=[average])
        named = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
        return history, alone, own, named

    results = FakeRanks(3).run(body)
    for rank, (history, alone, own, named) in enumerate(results):
        assert history == results[0][0]
        for key, values in expected.items():
            assert history[key] == pytest.approx(values * 2, rel=2e-6), key
            assert recorders[rank].logs[key] == history[key][-1]
        assert alone == pytest.approx(expected_alone, rel=2e-6)
        # Without the callback the metrics are this rank's own again.
        assert named == pytest.approx(own, rel=1e-6)
        assert named["loss"] != pytest.approx(expected["val_loss"][0], rel=1e-4)


def test_numbers_of_callbacks_are_averaged_and_objects_left_alone():
    class Adds(keras.callbacks.Callback):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def on_epoch_end(self, epoch, logs=None):
            logs.update(seconds=np.float32(self.rank), same=0.1, note=f"rank {self.rank}")

    parts = shares(data(12, 0), (4, 4, 4))
    models = [model_of(["accuracy"]) for _ in parts]

    def body(rank):
        return fit(models[rank], parts[rank], None, [Adds(rank), MetricAverageCallback()])

    for rank, history in enumerate(FakeRanks(3).run(body)):
        assert history["seconds"] == [1.0]
        assert history["same"] == [0.1]
        assert history["note"] == [f"rank {rank}"]


def test_multi_output_losses_and_metrics():
    """Also of a metric that is an array."""

    def multi():
        keras.utils.set_random_seed(5)
        precisions = keras.metrics.Precision([0.3, 0.6], name="precisions")
        inputs = keras.Input((3,))
        outputs = {n: keras.layers.Dense(1, "sigmoid", name=n)(inputs) for n in "ab"}
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.0),
            {"a": "binary_crossentropy", "b": "mse"},
            loss_weights={"a": 1.0, "b": 0.5},
            metrics={"a": ["accuracy", "auc", precisions], "b": ["mae"]},
        )
        return model

    def run(model, x, y, callbacks):
        targets = {"a": y, "b": y}
        options = {"batch_size": len(x) // 2, "verbose": 0, "callbacks": callbacks}
        history = model.fit(x, targets, shuffle=False, **options).history
        alone = model.evaluate(x, targets, return_dict=True, **options)
        return history | {f"{key} alone": [value] for key, value in alone.items()}

    x, y, _ = data(30, 2)
    expected = run(multi(), x, y, [])
    parts = shares((x, y), (8, 22))
    models = [multi() for _ in parts]
    # Keras weights losses by sizes known beforehand, which `fit` wants equal on all ranks.
    with mock.patch("tfscale.fit.agreement._batch_size", return_value=""):
        results = FakeRanks(2).run(
            lambda rank: run(models[rank], *parts[rank], [MetricAverageCallback()])
        )
    assert set(expected) >= {"loss", "a_loss", "b_loss", "a_accuracy", "a_auc", "b_mae"}
    assert np.shape(expected["a_precisions"]) == np.shape(expected["a_precisions alone"]) == (1, 2)
    for history in results:
        for key, values in expected.items():
            np.testing.assert_allclose(history[key], values, rtol=2e-6, err_msg=key)


def test_a_metric_that_returns_its_variable():
    class Bare(LargestPrediction):
        def result(self):
            return self.largest.value

    parts = shares(data(8, 0), (4, 4))
    models = [model_of([Bare()]) for _ in parts]
    histories = FakeRanks(2).run(
        lambda rank: fit(models[rank], parts[rank], data(4, 7), [MetricAverageCallback()])
    )
    expected = max(models[0].predict(part[0], verbose=0).max() for part in parts)
    assert histories[0]["largest"] == histories[1]["largest"] == [pytest.approx(expected)]


def test_an_unknown_reduction_is_refused():
    class Wrong(LargestPrediction):
        tfscale_reduce = "median"

    parts = shares(data(4, 0), (2, 2))
    models = [model_of([Wrong()]) for _ in parts]
    for error in FakeRanks(2).run(
        lambda rank: fit(models[rank], parts[rank], None, [MetricAverageCallback()])
    ):
        assert isinstance(error, ConfigError)
        assert "'median' for metric 'largest'" in str(error)


def test_one_process_is_plain_keras():
    train = data(8, 0)
    expected = fit(model_of(metrics()), train, train, [])
    history = fit(model_of(metrics()), train, train, [MetricAverageCallback()])
    assert history == expected
