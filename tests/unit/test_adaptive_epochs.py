"""AdaptiveBatchSize and the epochs of a run: those that are left, and those of decays."""

import keras
import numpy as np
import pytest

from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import adaptive, make_data, make_model
from tfscale.config import ConfigError


def history_of(fit=None, **options):
    data = make_data()
    model = make_model(keras.optimizers.SGD(0.125))
    callbacks = [adaptive(data, **options)]
    history = model.fit(data, verbose=0, callbacks=callbacks, **(fit or {})).history
    return history["batch_size"], history["learning_rate"]


@pytest.mark.parametrize(
    ("interval", "warmup", "sizes"),
    [
        (None, 0, [6] * 10),
        ((1, 2), 0, [6] * 2 + [12] * 2 + [24] * 6),
        ((1, 2), 1, [6] * 3 + [12] * 2 + [24] * 5),
    ],
)
def test_a_batch_whose_theta_has_not_settled_grows_only_by_a_given_limit(interval, warmup, sizes):
    options = {"tolerance": 1e-9, "saturation": None, "warmup_epochs": warmup}
    fit = {"initial_epoch": 50, "epochs": 60}
    assert history_of(fit, interval=interval, **options)[0] == sizes


@pytest.mark.parametrize(
    ("decays", "warmup", "first", "end"),
    [
        ((0,), 0, 0, 0),
        ((0, 5), 0, 0, 0),
        ((1,), 2, 0, 2),  # inside
        ((2,), 2, 0, 2),  # at its end: the epoch before was not looked at
        ((50,), 0, 50, 50),
        ((52, 55), 2, 50, 52),
    ],
)
def test_decays_within_the_warm_up_are_refused(decays, warmup, first, end):
    text = f"Decay from epoch {end + 1} on"
    fit = {"initial_epoch": first, "epochs": first + 6}
    with pytest.raises(ConfigError, match=text):
        history_of(fit, decay_epochs=decays, warmup_epochs=warmup)


@pytest.mark.parametrize(
    ("decays", "warmup", "first", "decayed"),
    [
        ((1,), 0, 0, 1),
        ((3,), 2, 0, 3),
        ((51,), 0, 50, 1),
        ((1, 53), 2, 50, 3),  # the first one is over
    ],
)
def test_the_first_decay_that_may_come_does(decays, warmup, first, decayed):
    fit = {"initial_epoch": first, "epochs": first + 5}
    _, rates = history_of(fit, interval=9, decay_epochs=decays, warmup_epochs=warmup)
    np.testing.assert_allclose(rates, [0.125] * decayed + [0.0125] * (5 - decayed), rtol=1e-6)
