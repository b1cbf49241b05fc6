"""The methods that adaptive batches are compared with."""

import keras
import numpy as np
import pytest

from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import Watch, make_data, make_model
from tfscale.callbacks import BatchSizeSchedule, LearningRateScaling


def test_sizes_at_given_epochs(capsys):
    data = make_data()
    watch = Watch(data)
    schedule = BatchSizeSchedule({4: 24, 1: 12})
    history = make_model().fit(data, epochs=5, verbose=2, callbacks=[schedule, watch]).history
    assert watch.seen == [(8, 6, 0.125), *[(4, 12, 0.125)] * 3, (2, 24, 0.125)]
    assert history["batch_size"] == [6, 12, 12, 12, 24]
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert [line.split()[0] for line in lines] == ["8/8", "4/4", "4/4", "4/4", "2/2"]


def test_the_size_follows_the_epoch_wherever_fit_begins():
    data = make_data()
    watch = Watch(data)
    schedule = BatchSizeSchedule({4: 24, 1: 12})
    make_model().fit(data, initial_epoch=3, epochs=5, verbose=0, callbacks=[schedule, watch])
    assert [size for _, size, _ in watch.seen] == [12, 24]
    make_model().fit(data, epochs=1, verbose=0, callbacks=[schedule, watch])
    assert [size for _, size, _ in watch.seen] == [12, 24, 6]


@pytest.mark.parametrize(("rule", "target"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_scaling_with_gradual_warm_up(rule, target):
    data = make_data(batch_size=24)  # two steps per epoch
    rates = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    scaling = LearningRateScaling(0.125, 6, 24, rule, warmup_epochs=2, decay_epochs=(4, 5))
    make_model().fit(data, epochs=6, verbose=0, callbacks=[scaling, Look()])
    growing = [1 + (target - 1) * i / 4 for i in range(4)]
    expected = [*growing, *[target] * 4, *[0.1 * target] * 2, *[0.01 * target] * 2]
    np.testing.assert_allclose(rates, 0.125 * np.array(expected), rtol=1e-6)


def test_a_batch_below_the_reference_has_its_rate_from_the_beginning():
    rate = LearningRateScaling(0.125, 24, 6, warmup_epochs=2, decay_epochs=(3,)).multiplier
    assert [rate(epoch) for epoch in (0, 0.5, 2)] == [0.25] * 3 and rate(3) == pytest.approx(0.025)


def test_no_warm_up():
    data = make_data(batch_size=24)
    watch = Watch(data)
    scaling = LearningRateScaling(0.125, 6, 24, warmup_epochs=0)
    make_model().fit(data, epochs=1, verbose=0, callbacks=[scaling, watch])
    assert watch.seen == [(2, 24, 0.5)]
