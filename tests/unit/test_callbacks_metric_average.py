"""MetricAverageCallback against one process that sees all samples; evaluations that fail."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.single_job import single_job  # noqa: F401
from tfscale.callbacks import MetricAverageCallback
from tfscale.config import ConfigError
from tfscale.testing import FakeRanks

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


def fit(model, train, validation, callbacks, epochs=1):
    """Train on two batches; those of arrays would have to be of one size on all ranks."""
    x = tf.data.Dataset.from_tensor_slices(tuple(train)).batch(len(train[0]) // 2)
    options = {"validation_data": validation, "callbacks": callbacks, "verbose": 0}
    return model.fit(x, epochs=epochs, **options).history


def evaluate(model, part, callbacks=(), **options):
    x, y, weight = part
    options = {"sample_weight": weight, "verbose": 0, **options}
    return model.evaluate(x, y, callbacks=list(callbacks), **options)


def test_fit_and_evaluate_give_the_metrics_of_one_process():
    train, validation = data(sum(SHARES), 0), data(sum(VALIDATION_SHARES), 1)
    one = model_of(metrics(), activity=False)
    expected = fit(one, train, validation, [])
    expected_alone = evaluate(one, validation)
    parts, validation_parts = shares(train, SHARES), shares(validation, VALIDATION_SHARES)
    models = [model_of(metrics(), activity=False) for _ in SHARES]

    def body(rank):
        model, part, seen = models[rank], validation_parts[rank], {}
        record = keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.update(logs))
        average = MetricAverageCallback()
        history = fit(model, parts[rank], part, [average, record], 2)
        own = {key: float(value) for key, value in model.get_metrics_result().items()}
        alone = evaluate(model, part, [average])
        return history, seen, alone, own, evaluate(model, part, return_dict=True)

    results = FakeRanks(3).run(body)
    for history, seen, alone, own, named in results:
        assert history == results[0][0]
        for key, values in expected.items():
            assert history[key] == pytest.approx(values * 2, rel=2e-6), key
            assert seen[key] == history[key][-1]
        assert alone == pytest.approx(expected_alone, rel=2e-6)
        # Without the callback the metrics are this rank's own again.
        assert named == pytest.approx(own, rel=1e-6)
        assert named["loss"] != pytest.approx(expected["val_loss"][0], rel=1e-4)


def test_numbers_of_callbacks_are_averaged_and_objects_left_alone():
    parts = shares(data(12, 0), (4, 4, 4))
    models = [model_of(["accuracy"]) for _ in parts]

    def body(rank):
        own = {"seconds": np.float32(rank), "same": 0.1, "note": f"rank {rank}"}
        adds = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own))
        return fit(models[rank], parts[rank], None, [adds, MetricAverageCallback()])

    for rank, history in enumerate(FakeRanks(3).run(body)):
        shown = {key: history[key] for key in ("seconds", "same", "note")}
        assert shown == {"seconds": [1.0], "same": [0.1], "note": [f"rank {rank}"]}


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


def fit_of_two(metric):
    parts = shares(data(8, 0), (4, 4))
    models = [model_of([metric()]) for _ in parts]
    results = FakeRanks(2).run(
        lambda rank: fit(models[rank], parts[rank], data(4, 7), [MetricAverageCallback()])
    )
    return results, max(models[0].predict(part[0], verbose=0).max() for part in parts)


def test_a_metric_that_returns_its_variable():
    class Bare(LargestPrediction):
        def result(self):
            return self.largest.value

    histories, expected = fit_of_two(Bare)
    assert histories[0]["largest"] == histories[1]["largest"] == [pytest.approx(expected)]


def test_an_unknown_reduction_is_refused():
    class Wrong(LargestPrediction):
        tfscale_reduce = "median"

    for error in fit_of_two(Wrong)[0]:
        assert isinstance(error, ConfigError)
        assert "'median' for metric 'largest'" in str(error)


def test_one_process_is_plain_keras():
    train = data(8, 0)
    expected = fit(model_of(metrics()), train, train, [])
    history = fit(model_of(metrics()), train, train, [MetricAverageCallback()])
    assert history == expected


PARTS = shares(data(12, 0), (4, 8))


def evaluate_broken(model, average):
    """Evaluate with data that ends with an error; all ranks catch it."""
    broken = tf.data.Dataset.from_tensors((np.full((4, 3), np.nan), np.ones((4, 1))))
    broken = broken.map(lambda x, y: (tf.debugging.check_numerics(x, "broken"), y))
    with pytest.raises(tf.errors.InvalidArgumentError, match="broken"):
        model.evaluate(broken, verbose=0, callbacks=[average])


@pytest.mark.parametrize("how", ["evaluate", "fit"])
def test_what_comes_after_an_evaluation_that_failed_is_ones_own(how):
    models = [model_of(["accuracy"]) for _ in PARTS]
    expected = evaluate(models[0], PARTS[0])

    def body(rank):
        evaluate_broken(models[rank], MetricAverageCallback())
        if rank == 0 and how == "evaluate":
            return evaluate(models[0], PARTS[0])
        return fit(models[0], PARTS[0], None, [])["loss"] if rank == 0 else None

    own, _ = FakeRanks(2).run(body)  # a collective of one rank is an error here
    assert own == pytest.approx(expected if how == "evaluate" else expected[:1], rel=1e-6)


def test_the_next_evaluation_with_it_is_that_of_all_ranks():
    """Also where one rank evaluates alone inside of it."""
    # No activity regularizer: Keras 3.10 adds it per batch, whatever the number of samples.
    models = [model_of(["accuracy"], activity=False) for _ in PARTS]
    together = [np.concatenate(parts) for parts in zip(*PARTS, strict=True)]
    expected = evaluate(model_of(["accuracy"], activity=False), together)

    def nest(batch, logs):
        if batch == 0:
            models[0].evaluate(*PARTS[0][:2], verbose=0)
            models[0].reset_metrics()

    def body(rank):
        average = MetricAverageCallback()
        evaluate_broken(models[rank], average)
        nested = [keras.callbacks.LambdaCallback(on_test_batch_begin=nest)] * (rank == 0)
        return evaluate(models[rank], PARTS[rank], [average, *nested])

    for result in FakeRanks(2).run(body):
        assert result == pytest.approx(expected, rel=1e-6)
