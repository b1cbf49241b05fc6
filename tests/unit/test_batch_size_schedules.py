"""The methods that adaptive batches are compared with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import Watch, arrays, make_data, make_model
from tests.unit.test_global_batches import as_rank
from tfscale.callbacks import BatchSizeSchedule, LearningRateScaling
from tfscale.config import ConfigError


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


@pytest.mark.parametrize(
    ("sizes", "text"),
    [({}, "Received: none"), ({-1: 4}, "epoch=-1"), ({1: 0}, "batch_size=0"), ({1: 2.5}, "=2.5")],
)
def test_schedules_without_sense(sizes, text):
    with pytest.raises(ConfigError, match=text):
        BatchSizeSchedule(sizes)


def test_sizes_beyond_the_data():
    with pytest.raises(ConfigError, match="Received: size=49, samples=48. Use a smaller size"):
        make_model().fit(make_data(), verbose=0, callbacks=[BatchSizeSchedule({1: 49})])


def test_sizes_that_the_ranks_cannot_share():
    data = as_rank(make_data(), 0, 2)
    with pytest.raises(ConfigError, match="batch_size=9, size=2") as error:
        make_model().fit(data, verbose=0, callbacks=[BatchSizeSchedule({1: 9})])
    assert "Name sizes that are multiples" in str(error.value)
    assert "max_batch_size" not in str(error.value) and "active_ranks" not in str(error.value)


@pytest.mark.parametrize("wrap", [lambda schedule: schedule, tfscale.ScalableSchedule])
def test_rates_that_count_steps(wrap):
    rate = wrap(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    model = make_model(keras.optimizers.SGD(rate))
    with pytest.raises(ConfigError, match=f"learning_rate={type(rate).__name__}. Use a number"):
        model.fit(make_data(), verbose=0, callbacks=[BatchSizeSchedule({1: 12})])


def test_other_data():
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6).repeat()
    with pytest.raises(ConfigError, match="Use tfscale.data.GlobalBatches"):
        make_model().fit(
            dataset, steps_per_epoch=2, verbose=0, callbacks=[BatchSizeSchedule({1: 12})]
        )


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


def test_no_warm_up():
    data = make_data(batch_size=24)
    watch = Watch(data)
    scaling = LearningRateScaling(0.125, 6, 24, warmup_epochs=0)
    make_model().fit(data, epochs=1, verbose=0, callbacks=[scaling, watch])
    assert watch.seen == [(2, 24, 0.5)]


@pytest.mark.parametrize("options", [{"rule": "cubic"}, {"batch_size": 0}, {"warmup_epochs": -1}])
def test_scalings_out_of_range(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        LearningRateScaling(
            **{"initial_lr": 0.1, "base_batch_size": 6, "batch_size": 12, **options}
        )
