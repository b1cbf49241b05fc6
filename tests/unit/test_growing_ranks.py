"""Losses, metrics and options of fit where some ranks have weight 0."""

import keras
import numpy as np
import pytest

from tests.unit.adaptive_model import adaptive, arrays, make_data, make_model
from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.served_batches import as_rank
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.data.slices import count_active

BATCH = 4  # feeds two ranks
RANDOM = np.random.default_rng(0)
SEQUENCES = RANDOM.normal(size=(8, 5, 3)).astype("float32")
IMAGES = RANDOM.normal(size=(8, 2, 3, 3)).astype("float32")  # as wide as a slice has samples
CLASSES = RANDOM.integers(0, 7, (8, 5))
MANY = RANDOM.integers(0, 2, (8, 5, 7)).astype("float32")
CASES = {
    "one value": (SEQUENCES[:, 0], SEQUENCES[:, 0, :1], 1, "mse"),
    "vectors": (SEQUENCES[:, 0], SEQUENCES[:, 0], 3, "mse"),
    "sequences": (SEQUENCES, SEQUENCES[..., :2], 2, "huber"),
    "classes": (SEQUENCES, CLASSES, 7, "sparse_categorical_crossentropy"),
    "many classes": (SEQUENCES, MANY, 7, "binary_crossentropy"),
    "images": (IMAGES, IMAGES[..., :1], 1, "mse"),
}


class Subclass(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


def model_of(x, units, loss, is_subclass):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(units, "sigmoid")
    sequential = keras.Sequential([keras.Input(x.shape[1:]), layer])
    model = Subclass(layer) if is_subclass else sequential
    metric = "sparse_categorical_crossentropy" if loss.startswith("sparse") else "mae"
    others = [keras.metrics.AUC(), keras.metrics.Recall()] if loss.startswith("binary") else []
    model.compile("sgd", loss, weighted_metrics=[metric, *others])
    return model


@pytest.mark.parametrize("is_subclass", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_mean_over_ranks_is_the_loss_of_the_batch(case, is_subclass):
    x, y, units, loss = CASES[case]
    model = model_of(x, units, loss, is_subclass)
    alone = as_rank(GlobalBatches(x, y, batch_size=BATCH, shuffle=False))
    model.fit(alone, verbose=0)
    expected = model.evaluate(alone, verbose=0)
    results = []
    for rank in range(5):
        data = as_rank(GlobalBatches(x, y, batch_size=5, shuffle=False), rank, 5)
        data.use_active_ranks()
        data.batch_size = BATCH
        results.append(model.evaluate(data, verbose=0))
    losses, averages, *_ = zip(*results, strict=True)
    assert count_active(BATCH, 5) == 2 and losses[2:] == (0.0, 0.0, 0.0)
    assert np.mean(losses) == pytest.approx(expected[0], rel=1e-5)
    assert np.mean(averages[:2]) == pytest.approx(expected[1], rel=1e-5)


def refused(text, loss="mse", data=None, **options):
    data, model = data or make_data(), make_model()
    model.compile("sgd", loss)
    with pytest.raises(ConfigError, match=text):
        callback = adaptive(data, active_ranks="grow")
        model.fit(data, verbose=0, callbacks=[callback], **options)
    assert all(len(batch) == 2 - (data.batch_size == 8) for batch in data), "has no weights"


def test_what_weights_of_zero_would_spoil():
    refused("class_weight in fit.*GlobalBatches\\(sample_weight=\\)", class_weight={0: 1.0})
    refused("Received: data without y", data=GlobalBatches(arrays()[0], batch_size=8))
    for reduction in ("mean_with_sample_weight", "sum", "none", None):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        for given in (loss, [loss]):
            refused(f"reduction={reduction!r} of 'mean_squared_error'", given)
