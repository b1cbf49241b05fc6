"""Training on GlobalBatches equals training on batches cut by hand, weights included."""

import keras
import numpy as np
import pytest

from tests.unit.test_global_batches import as_rank
from tests.unit.test_global_batches_fit import At
from tfscale.data import GlobalBatches

pytestmark = pytest.mark.filterwarnings("error:.*ran out of data", "error:.*shuffle=True")


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def make_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def make_arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(30, 4)), rng.integers(0, 3, 30), rng.uniform(size=30)


def train_by_hand(x, y, weight, epochs):
    from tfscale.data.slices import epoch_order

    model = make_model()
    for epoch in range(epochs):
        for rows in epoch_order(2, epoch, 30).reshape(3, 10):
            model.train_on_batch(x[rows], y[rows], None if weight is None else weight[rows])
    return model.get_weights()


@pytest.mark.parametrize("weighting", ["none", "sample_weight", "class_weight"])
def test_fit_equals_batches_cut_by_hand(float64, weighting):
    x, y, weight = make_arrays()
    classes = {0: 0.5, 1: 1.0, 2: 3.0}
    own = {"sample_weight": weight} if weighting == "sample_weight" else {}
    fits = {"class_weight": classes} if weighting == "class_weight" else {}
    by_class = np.array([classes[label] for label in y])
    by_hand = {"none": None, "sample_weight": weight, "class_weight": by_class}[weighting]
    model = make_model()
    model.fit(
        as_rank(GlobalBatches(x, y, batch_size=10, seed=2, **own)), epochs=2, verbose=0, **fits
    )
    for got, wanted in zip(
        model.get_weights(), train_by_hand(x, y, by_hand, epochs=2), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-14)


def test_class_weight_with_sample_weight_is_an_error():
    x, y, weight = make_arrays()
    data = as_rank(GlobalBatches(x, y, batch_size=10, sample_weight=weight))
    with pytest.raises(ValueError, match="class_weight"):
        make_model().fit(data, class_weight={0: 1.0, 1: 1.0, 2: 2.0}, verbose=0)


def test_growing_batches_do_not_retrace(float64):
    x, y, _ = make_arrays()
    data, model, traces = as_rank(GlobalBatches(x, y, batch_size=2)), make_model(), []
    layer_call = model.layers[0].call
    model.layers[0].call = lambda *a, **k: traces.append(1) or layer_call(*a, **k)
    grow = At(on_epoch_begin=lambda _, epoch: setattr(data, "batch_size", (2, 6, 30)[epoch]))
    model.fit(data, epochs=3, verbose=0, callbacks=[grow])
    assert len(traces) <= 2
    assert model.optimizer.iterations == 15 + 5 + 1
