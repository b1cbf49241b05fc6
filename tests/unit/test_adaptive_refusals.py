"""What AdaptiveBatchSize refuses, with the remedy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import adaptive, arrays, make_data, make_model
from tests.unit.test_global_batches import as_rank
from tfscale.callbacks import (
    BackupAndRestore,
    BatchSizeSchedule,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from tfscale.callbacks.adaptive_batch_size import GROWTH_REMEDY, check_compared
from tfscale.callbacks.batch_size_schedule import check_sizes
from tfscale.comm import runtime
from tfscale.config import ConfigError


def refused(text, *callbacks, data=None, optimizer=None, model=None, before=(), **options):
    """Return the message of a fit that is refused."""
    data = data or make_data()
    fit_options = options.pop("fit", {})
    with pytest.raises(ConfigError, match=text) as error:
        callback = adaptive(data, **options)
        (model or make_model(optimizer)).fit(
            fit_options.pop("x", data), verbose=0, callbacks=[*before, callback, *callbacks],
            **fit_options,
        )  # fmt: skip
    return str(error.value)


def test_maximum_above_the_data():
    text = refused("Received: max_batch_size=96, samples=48", maximum=96)
    assert "Use a smaller max_batch_size" in text


def test_maximum_below_the_start():
    assert "start_batch_size=6, max_batch_size=3" in refused("grows from", maximum=3)


def test_a_batch_that_the_ranks_cannot_share():
    data = as_rank(make_data(batch_size=6), 0, 2)
    with pytest.raises(ConfigError, match=r"\[6, 9, 18\].*Received.*batch_size=9, size=2") as error:
        check_sizes(data, [6, 9, 18], "max_batch_size", GROWTH_REMEDY)
    assert 'active_ranks="grow"' in str(error.value)


@pytest.mark.parametrize("repeats", [False, True])
def test_data_that_tfscale_does_not_cut(repeats):
    dataset = tf.data.Dataset.from_tensor_slices(arrays()).batch(6)
    text = refused("Received: data=", data=dataset.repeat() if repeats else dataset)
    assert "GlobalBatches" in text and "not batched or repeated" in text


def test_a_repeated_dataset_of_records():
    records = tf.data.Dataset.from_tensor_slices(arrays()).repeat()
    with pytest.raises(ConfigError, match=r"Remove repeat\(\)"):
        tfscale.data.GlobalBatches.from_dataset(records, batch_size=6)


def test_other_data_than_fit_trains_on():
    text = refused("another object, GlobalBatches", fit={"x": make_data()})
    assert "Pass the same GlobalBatches to both" in text


def test_a_second_callback_that_sets_the_batch_size():
    text = "Received: BatchSizeSchedule and AdaptiveBatchSize. Remove one"
    refused(text, BatchSizeSchedule({1: 12}))
    schedule, data = BatchSizeSchedule({1: 12}), make_data()
    with pytest.raises(ConfigError, match="Received: BatchSizeSchedule and BatchSizeSchedule"):
        make_model().fit(data, verbose=0, callbacks=[schedule, BatchSizeSchedule({2: 12})])
    refused("Received: AdaptiveBatchSize and BatchSizeSchedule", before=[schedule])


def test_steps_per_epoch():
    text = refused("Received: steps_per_epoch", fit={"steps_per_epoch": 3})
    assert "Leave it out" in text


def test_a_schedule_outside_of_the_wrapper():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    text = refused("learning_rate=ExponentialDecay", optimizer=keras.optimizers.SGD(schedule))
    assert "tfscale.ScalableSchedule(schedule)" in text


@pytest.mark.parametrize(
    "other",
    [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        LearningRateScheduleCallback(0.1, 0.5),
        LearningRateWarmupCallback(0.1, warmup_epochs=3),
        keras.callbacks.ReduceLROnPlateau(),
    ],
)
def test_two_callbacks_that_set_the_rate(other):
    text = refused("One callback sets the learning rate", other, warmup_epochs=2)
    assert type(other).__name__ in text and "Remove it" in text


def test_a_backup_behind(tmp_path):
    assert "Put it first" in refused(
        "BackupAndRestore comes before", BackupAndRestore(str(tmp_path / "backup"))
    )


class Deferred(keras.Model):
    """Knows its shapes from the first batch only."""

    def __init__(self, looks_at_values=False):
        super().__init__()
        self.out, self.looks_at_values = keras.layers.Dense(1), looks_at_values
        self.compile("sgd", "mse")

    def call(self, x):
        return self.out(x[x.numpy()[0, 0] > 0 :] if self.looks_at_values else x)


def test_a_model_that_is_not_built_is_built_from_the_data():
    data, model = make_data(), Deferred()
    first, look = [], keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: first.append(model.out.kernel.numpy())
    )  # fmt: skip
    history = model.fit(data, epochs=3, verbose=0, callbacks=[adaptive(data), look]).history
    assert history["batch_size"] == [6, 6, 12] and np.all(np.isfinite(history["theta"]))
    assert first[0].shape == (4, 1)


def test_a_model_that_cannot_be_built_from_the_data():
    assert "Call the model on one batch" in refused("its shapes cannot", model=Deferred(True))


def test_noise_scale_on_one_process():
    text = refused("Received: one process", signal="noise_scale")
    assert "signal='theta'" in text


@pytest.mark.parametrize(
    ("size", "sizes", "lonely"),
    [(2, [2, 4, 8], 2), (3, [3, 6], 3), (4, [2, 3, 6], 2), (2, [4, 8], None), (4, [3], None)],
)
def test_noise_scale_of_batches_that_feed_one_rank(monkeypatch, size, sizes, lonely):
    """With three ranks, 3 samples cannot be shared: each must have two."""
    monkeypatch.setattr(runtime, "size", lambda: size)
    if lonely is None:
        check_compared(sizes)
        return
    with pytest.raises(ConfigError, match=f"batch size {lonely}, which feeds one of {size} ranks"):
        check_compared(sizes)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"signal": "noise_scale", "interval": (1, 9)}, r"Received: interval=\(1, 9\)"),
        ({"active_ranks": "some"}, "active_ranks='some'"),
        ({"rule": "best"}, "rule='best'"),
        ({"signal": "loss"}, "signal='loss'"),
        ({"factor": 1}, "factor=1"),
        ({"interval": 0}, "interval=0"),
        ({"interval": (4, 2)}, "high=2"),
        ({"start_batch_size": 30}, "start_batch_size=30"),
    ],
)
def test_arguments(options, text):
    with pytest.raises(ConfigError, match=text):
        adaptive(make_data(), **options)


def test_a_loss_that_is_not_there():
    class Silent(keras.Sequential):
        def train_step(self, data):
            super().train_step(data)
            return {"other": 0.0}

    model = Silent([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    assert "Let train_step return 'loss'" in refused("logs=", model=model)
