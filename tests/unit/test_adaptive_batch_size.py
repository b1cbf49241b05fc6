"""Batches that grow in one process: AdaptiveBatchSize and BatchSizeSchedule, and their rates."""

import contextlib
import json
import math

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.ranks import InterruptAt, Interruption
from tests.unit.adaptive_model import SAMPLES, adaptive, arrays, make_data, make_model
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.callbacks import (
    BackupAndRestore,
    BatchSizeSchedule,
    Checkpoint,
    LearningRateScaling,
    LearningRateScheduleCallback,
)
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.testing import require_identical

SIZES = [6, 6, 12, 12, 24]


class Watch(keras.callbacks.Callback):
    def __init__(self, data):
        super().__init__()
        self.data, self.seen, self.n = data, [], 0

    def on_train_batch_end(self, batch, logs=None):
        self.n += 1

    def on_epoch_end(self, epoch, logs=None):
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.seen.append((self.n, self.data.batch_size, rate))
        self.n = 0


def train(callback, *others, data=None, rate=0.125, model=None, **options):
    """Return the record of `Watch`, and the history, which is empty after an interruption."""
    data, model = data or callback.data, model or make_model(keras.optimizers.SGD(rate))
    watch, options = Watch(data), {"epochs": 5, "verbose": 0, **options}
    with contextlib.suppress(Interruption):
        history = model.fit(data, callbacks=[*others, callback, watch], **options).history
        return watch.seen, history
    return watch.seen, {}


def test_batch_and_rate_grow_and_decay():
    seen, history = train(adaptive(make_data(), decay_epochs=(6, 7)), epochs=8)
    sizes = [6, 6, 12, 12, 24, 24, 24, 24]
    rates = [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 0.0125, 0.00125]
    assert [steps for steps, _, _ in seen] == [SAMPLES // size for size in sizes]
    assert [size for _, size, _ in seen] == sizes == history["batch_size"]
    np.testing.assert_allclose([rate for _, _, rate in seen], rates, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], rates, rtol=1e-6)


def test_theta_is_that_of_equation_5_4():
    data, model = make_data(), make_model(keras.optimizers.SGD(0.125))
    start = [w.copy() for w in model.get_weights()]
    x, y = next(iter(data))
    first = float(np.mean((model(x) - y) ** 2))
    thetas = []

    def note(epoch, logs):
        moved = [w - s for w, s in zip(model.get_weights(), start, strict=True)]
        distance = math.sqrt(sum(float(np.sum(np.square(m))) for m in moved))
        thetas.append((first - logs["loss"]) / distance)

    noting = keras.callbacks.LambdaCallback(on_epoch_end=note)
    _, history = train(adaptive(data), noting, model=model)
    np.testing.assert_allclose(history["theta"], thetas, rtol=1e-4)


def test_a_loss_that_is_not_a_number_grows_nothing():
    data = GlobalBatches(*(a * np.nan for a in arrays()), batch_size=6)
    _, history = train(adaptive(data, interval=(1, 9), saturation=0.5), epochs=8)
    assert history["batch_size"] == [6] * 8 and np.all(np.isnan(history["theta"]))


@pytest.mark.parametrize("rule", ["robust", "thesis", "peak"])
def test_an_interval_is_found_on_a_real_curve(rule, tmp_path):
    path = tmp_path / "adaptive.jsonl"
    train(adaptive(make_data(), interval=(1, 8), rule=rule, log_path=path), rate=0.01, epochs=24)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = next(line for line in lines if line["interval"])
    thetas = [line["theta"] for line in lines[: found["epoch"] + 1]]
    is_peak = rule == "peak" and "peaked" in found["reasons"][0]
    assert found["interval"] == (int(np.argmax(thetas)) + 1 if is_peak else len(thetas))
    assert found["next_batch_size"] == 12
    assert lines[-1]["batch_size"] == 24


def test_warm_up_belongs_to_another_callback():
    warmup = LearningRateScheduleCallback(0.5, lambda epoch: (epoch + 1) / 2, end_epoch=2)
    seen, _ = train(adaptive(make_data(), warmup_epochs=2), warmup)
    assert [size for _, size, _ in seen] == [6, 6, 6, 6, 12]
    np.testing.assert_allclose([rate for *_, rate in seen], [0.25, 0.5, 0.5, 0.5, 1.0])


def test_a_schedule_goes_on_at_the_pace_of_samples():
    schedule = keras.optimizers.schedules.CosineDecay(0.125, 40)
    seen, _ = train(adaptive(make_data()), rate=tfscale.ScalableSchedule(schedule))
    for epoch, (_, size, rate) in enumerate(seen):
        # At the end of an epoch as many samples were seen as in 8 steps of 6 each.
        expected = float(schedule(8.0 * (epoch + 1))) * size / 6
        assert rate == pytest.approx(expected, rel=1e-5)


def test_velocities_follow_the_rate():
    def velocity(correct):
        model, seen = make_model(), []
        look = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: seen.append(
                model.optimizer.momentums[0].numpy() if epoch else None
            )
        )
        callback = adaptive(make_data(24), 48, interval=1, momentum_correction=correct)
        model.fit(callback.data, epochs=2, verbose=0, callbacks=[callback, look])
        return seen[-1]

    np.testing.assert_allclose(velocity(True), 2 * velocity(False), rtol=1e-6)


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("at", [(1, 3), (4, 0), (6, 1)])
def test_a_run_goes_on_bit_by_bit(tmp_path, at, has_schedule):
    """K is found in epoch 3 or later: theta's history, w_0 and the first loss must come along."""

    def run(name, *callbacks):
        rate = keras.optimizers.schedules.CosineDecay(0.02, 64) if has_schedule else 0.02
        rate = tfscale.ScalableSchedule(rate) if has_schedule else rate
        model = make_model(keras.optimizers.SGD(rate, momentum=0.5), dropout=0.3)
        own = adaptive(make_data(), interval=(1, 3), log_path=tmp_path / name, decay_epochs=(7,))
        train(own, *callbacks, model=model, epochs=9)
        return model, (tmp_path / name).read_text()

    keras.config.set_floatx("float32")
    expected, lines = run("whole.jsonl")
    backup = str(tmp_path / "backup")
    run("cut.jsonl", BackupAndRestore(backup), InterruptAt(*at))
    resumed, own_lines = run("cut.jsonl", BackupAndRestore(backup))
    require_identical(resumed.get_weights(), expected.get_weights())
    assert own_lines == lines
    assert len({json.loads(line)["batch_size"] for line in lines.splitlines()}) == 3


def test_a_run_goes_on_with_its_ladder_only(tmp_path):
    train(adaptive(make_data()), BackupAndRestore(tmp_path), InterruptAt(2, 0))
    with pytest.raises(ConfigError, match=r"the backup has \[6, 12, 24\]"):
        train(adaptive(make_data(), 48), BackupAndRestore(tmp_path))


def test_a_model_that_is_not_built_is_built_from_the_data():
    model, first = keras.Sequential([keras.layers.Dense(1)]), []
    model.compile("sgd", "mse")
    callback = adaptive(make_data())
    look = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: first.append(model.layers[0].kernel.shape)
    )
    callbacks = [callback, look]
    history = model.fit(callback.data, epochs=3, verbose=0, callbacks=callbacks).history
    assert history["batch_size"] == [6, 6, 12] and np.all(np.isfinite(history["theta"]))
    assert first == [(4, 1)]


@pytest.mark.parametrize(
    ("interval", "warmup", "sizes"),
    [
        (None, 0, [6] * 10),
        ((1, 2), 0, [6] * 2 + [12] * 2 + [24] * 6),
        ((1, 2), 1, [6] * 3 + [12] * 2 + [24] * 5),
    ],
)
def test_a_batch_whose_theta_has_not_settled_grows_only_by_a_given_limit(interval, warmup, sizes):
    options = {"interval": interval, "warmup_epochs": warmup, "saturation": None}
    callback = adaptive(make_data(), tolerance=1e-9, **options)
    _, history = train(callback, initial_epoch=50, epochs=60)
    assert history["batch_size"] == sizes


@pytest.mark.parametrize(
    ("decays", "warmup", "first", "decayed"),
    [
        ((0,), 0, 0, "Decay from epoch 1 on"),
        ((1,), 2, 0, "Decay from epoch 3 on"),  # inside
        ((2,), 2, 0, "Decay from epoch 3 on"),  # at its end: the epoch before was not looked at
        ((52, 55), 2, 50, "Decay from epoch 53 on"),
        ((1,), 0, 0, 1),
        ((3,), 2, 0, 3),
        ((51,), 0, 50, 1),
        ((1, 53), 2, 50, 3),  # the first one is over
    ],
)
def test_the_first_decay_comes_after_the_warm_up(decays, warmup, first, decayed):
    options = {"decay_epochs": decays, "warmup_epochs": warmup, "interval": 9}
    fit_options = {"initial_epoch": first, "epochs": first + 5}
    if isinstance(decayed, str):
        with pytest.raises(ConfigError, match=decayed):
            train(adaptive(make_data(), **options), **fit_options)
    else:
        _, history = train(adaptive(make_data(), **options), **fit_options)
        expected = [0.125] * decayed + [0.0125] * (5 - decayed)
        np.testing.assert_allclose(history["learning_rate"], expected, rtol=1e-6)


def test_sizes_at_given_epochs(capsys):
    schedule = BatchSizeSchedule({4: 24, 1: 12})
    seen, history = train(schedule, data=make_data(), verbose=2)
    assert seen == [(8, 6, 0.125), *[(4, 12, 0.125)] * 3, (2, 24, 0.125)]
    assert history["batch_size"] == [6, 12, 12, 12, 24]
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert [line.split()[0] for line in lines] == ["8/8", "4/4", "4/4", "4/4", "2/2"]


def test_the_size_follows_the_epoch_wherever_fit_begins():
    data, schedule = make_data(), BatchSizeSchedule({4: 24, 1: 12})
    assert sizes_of(train(schedule, data=data, initial_epoch=3)) == [12, 24]
    assert sizes_of(train(schedule, data=data, epochs=1)) == [6]


@pytest.mark.parametrize(("rule", "target"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_scaling_with_gradual_warm_up(rule, target):
    rates = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(look.model.optimizer.learning_rate + 0)
    )
    scaling = LearningRateScaling(0.125, 6, 24, rule, warmup_epochs=2, decay_epochs=(4, 5))
    data = make_data(batch_size=24)  # two steps per epoch
    make_model().fit(data, epochs=6, verbose=0, callbacks=[scaling, look])
    growing = [1 + (target - 1) * i / 4 for i in range(4)]
    expected = [*growing, *[target] * 4, *[0.1 * target] * 2, *[0.01 * target] * 2]
    np.testing.assert_allclose(rates, 0.125 * np.array(expected), rtol=1e-6)


def test_a_batch_below_the_reference_has_its_rate_from_the_beginning():
    rate = LearningRateScaling(0.125, 24, 6, warmup_epochs=2, decay_epochs=(3,)).multiplier
    assert [rate(epoch) for epoch in (0, 0.5, 2)] == [0.25] * 3 and rate(3) == pytest.approx(0.025)
    assert LearningRateScaling(0.125, 6, 24, warmup_epochs=0).multiplier(0) == 4


def scheduled(data):
    return BatchSizeSchedule({2: 12, 4: 24})


def sizes_of(trained):
    return [size for _, size, _ in trained[0]]


GROWING = pytest.mark.parametrize("make", [adaptive, scheduled])


@GROWING
@pytest.mark.parametrize("is_same", [True, False])
def test_each_fit_begins_with_the_size_and_rate_of_the_data(make, is_same):
    """Also one after a fit that broke off."""
    data, model = make_data(), make_model()
    callback = make(data)
    first, _ = train(callback, InterruptAt(3, 1), data=data, model=model)
    assert [size for _, size, _ in first] == SIZES[:3] and data.batch_size == 12
    for _ in range(2):
        if not is_same:
            callback, model = make(data), make_model()
        seen, _ = train(callback, data=data, model=model)
        assert [size for _, size, _ in seen] == SIZES and seen[:3] == first
        assert (data.batch_size, len(data), len(data[0][0])) == (6, 8, 6)
    model.optimizer.learning_rate = 0.01  # who changes it in between means it
    assert train(callback, data=data, model=model)[0][0][-1] == pytest.approx(0.01)


def test_what_is_set_after_a_fit_that_broke_off_holds():
    data = make_data()
    train(adaptive(data), InterruptAt(3, 1))
    data.batch_size = 24
    assert sizes_of(train(adaptive(data))) == [24] * 5
    assert data.batch_size == 24


def test_what_a_fit_that_broke_off_has_left_ends_with_the_next_one():
    def broken():
        data = make_data()
        train(adaptive(data, active_ranks="grow"), InterruptAt(3, 1))
        assert data.batch_size == 12 and data.has_surplus_ranks
        return data

    data = broken()
    make_model().fit(data, verbose=0, class_weight={0: 1.0})  # beside which weights are refused
    assert data.batch_size == 6 and len(data[0]) == 2
    data = broken()
    make_model().evaluate(data, verbose=0)
    assert data.batch_size == 6 and len(data[0]) == 2
    data = broken()
    data.batch_size = 8
    assert data.batch_size == 8 and len(data[0]) == 2


def test_weights_of_surplus_ranks_are_served_within_the_fit_only():
    class Parts(keras.Sequential):
        def train_step(self, data):
            self.n_parts = len(data)
            return super().train_step(data)

    def parts():
        model = Parts([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    data = make_data()
    callback = adaptive(data, active_ranks="grow")
    assert len(data[0]) == 2
    for _ in range(2):
        model = parts()
        assert sizes_of(train(callback, model=model)) == SIZES
        assert (model.n_parts, len(data[0])) == (3, 2)
    model = parts()
    model.fit(data, verbose=0)
    assert model.n_parts == 2
    with pytest.raises(ConfigError, match="max_batch_size=96"):  # which changes nothing either
        train(adaptive(data, 96, active_ranks="grow"))
    assert len(data[0]) == 2


@GROWING
@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("saving", [BackupAndRestore, Checkpoint])
def test_a_run_that_goes_on_has_the_size_of_then(tmp_path, saving, make, is_fresh):
    data = make_data()
    callback = make(data)
    first = train(callback, saving(tmp_path), InterruptAt(3, 1), data=data)
    assert sizes_of(first) == SIZES[:3]
    if is_fresh:
        data = make_data()
        callback = make(data)
    assert sizes_of(train(callback, saving(tmp_path), data=data)) == SIZES[3:]
    assert data.batch_size == 6
