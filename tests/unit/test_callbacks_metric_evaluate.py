"""MetricAverageCallback where an `evaluate` fails, or another runs inside of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401
from tests.unit.test_callbacks_metric_average import data, model_of, shares
from tfscale.callbacks import MetricAverageCallback

PARTS = shares(data(12, 0), (4, 8))


def evaluate(model, part, callbacks=()):
    x, y, weight = part
    return model.evaluate(x, y, sample_weight=weight, verbose=0, callbacks=list(callbacks))


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
        average = MetricAverageCallback()
        evaluate_broken(models[rank], average)
        if rank == 0 and how == "evaluate":
            return evaluate(models[0], PARTS[0])
        if rank == 0:
            x, y, weight = PARTS[0]
            fit = models[0].fit(x, y, sample_weight=weight, verbose=0, callbacks=[])
            return list(fit.history["loss"])
        return None

    own, _ = FakeRanks(2).run(body)  # a collective of one rank is an error here
    assert own == pytest.approx(expected if how == "evaluate" else expected[:1], rel=1e-6)


def test_the_next_evaluation_with_it_is_that_of_all_ranks():
    # No activity regularizer: Keras 3.10 adds it per batch, whatever the number of samples.
    models = [model_of(["accuracy"], activity=False) for _ in PARTS]
    together = [np.concatenate(parts) for parts in zip(*PARTS, strict=True)]
    expected = evaluate(model_of(["accuracy"], activity=False), together)

    class Nested(keras.callbacks.Callback):
        """Evaluates on one rank alone, inside of an evaluation on all."""

        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def on_test_batch_begin(self, batch, logs=None):
            if self.rank == 0 and batch == 0:
                self.model.evaluate(*PARTS[0][:2], verbose=0)
                self.model.reset_metrics()

    def body(rank):
        average = MetricAverageCallback()
        evaluate_broken(models[rank], average)
        return evaluate(models[rank], PARTS[rank], [average, Nested(rank)])

    for result in FakeRanks(2).run(body):
        assert result == pytest.approx(expected, rel=1e-6)
