"""AdaptiveBatchSize in one process: what it sets, shows and writes; real theta; resume."""

import contextlib
import json
import math

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.ranks import InterruptAt, Interruption
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.callbacks import AdaptiveBatchSize, BackupAndRestore
from tfscale.data import GlobalBatches

SAMPLES = 48


def arrays(samples=SAMPLES):
    rng = np.random.default_rng(1)
    return rng.normal(size=(samples, 4)).astype("float32"), rng.normal(size=(samples, 1))


def make_data(batch_size=6, seed=3, **options):
    return GlobalBatches(*arrays(), batch_size=batch_size, seed=seed, **options)


def make_model(optimizer=None, dropout=0.0):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dropout(dropout), layers.Dense(1)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.125, momentum=0.5), "mse")
    return model


def adaptive(data, maximum=24, **options):
    return AdaptiveBatchSize(data, maximum, **{"log_path": None, "interval": 2, **options})


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


def test_batch_and_rate_grow_and_decay():
    data = make_data()
    watch = Watch(data)
    callback = adaptive(data, decay_epochs=(6, 7))
    history = make_model().fit(data, epochs=8, verbose=0, callbacks=[callback, watch]).history
    sizes = [6, 6, 12, 12, 24, 24, 24, 24]
    rates = [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 0.0125, 0.00125]
    assert [steps for steps, _, _ in watch.seen] == [SAMPLES // size for size in sizes]
    assert [size for _, size, _ in watch.seen] == sizes == history["batch_size"]
    np.testing.assert_allclose([rate for _, _, rate in watch.seen], rates, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], rates, rtol=1e-6)


def test_theta_is_that_of_equation_5_4():
    data, model = make_data(), make_model(keras.optimizers.SGD(0.125))
    start = [w.copy() for w in model.get_weights()]
    x, y = next(iter(data))
    first = float(np.mean((model(x) - y) ** 2))

    class Check(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            moved = [w - s for w, s in zip(self.model.get_weights(), start, strict=True)]
            distance = math.sqrt(sum(float(np.sum(np.square(m))) for m in moved))
            assert logs["theta"] == pytest.approx((first - logs["loss"]) / distance, rel=1e-4)

    model.fit(data, epochs=4, verbose=0, callbacks=[adaptive(data), Check()])


def test_a_loss_that_is_not_a_number_grows_nothing(tmp_path):
    path = tmp_path / "adaptive.jsonl"
    data = GlobalBatches(*(a * np.nan for a in arrays()), batch_size=6)
    callback = AdaptiveBatchSize(data, 24, log_path=path, interval=(1, 9), saturation=0.5)
    make_model().fit(data, epochs=8, verbose=0, callbacks=[callback])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["batch_size"] for line in lines} == {6}
    assert {line["theta"] for line in lines} == {None}


@pytest.mark.parametrize("rule", ["robust", "thesis", "peak"])
def test_an_interval_is_found_on_a_real_curve(rule, tmp_path):
    data, path = make_data(), tmp_path / "adaptive.jsonl"
    callback = adaptive(data, interval=(1, 8), rule=rule, log_path=path)
    make_model(keras.optimizers.SGD(0.01)).fit(data, epochs=24, verbose=0, callbacks=[callback])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = next(line for line in lines if line["interval"])
    thetas = [line["theta"] for line in lines[: found["epoch"] + 1]]
    if rule == "peak" and "peaked" in found["reasons"][0]:
        assert found["interval"] == int(np.argmax(thetas)) + 1
    else:
        assert found["interval"] == len(thetas)
    assert found["next_batch_size"] == 12
    assert lines[-1]["batch_size"] == 24


def test_warm_up_belongs_to_another_callback(tmp_path):
    class WarmUp(tfscale.callbacks.LearningRateScheduleCallback):
        def __init__(self):
            super().__init__(0.5, lambda epoch: (epoch + 1) / 2, end_epoch=2)

    data = make_data()
    watch = Watch(data)
    callbacks = [WarmUp(), adaptive(data, warmup_epochs=2), watch]
    make_model().fit(data, epochs=5, verbose=0, callbacks=callbacks)
    assert [(size, rate) for _, size, rate in watch.seen] == [
        (6, 0.25), (6, 0.5), (6, 0.5), (6, 0.5), (12, 1.0)
    ]  # fmt: skip


def test_a_schedule_goes_on_at_the_pace_of_samples():
    schedule = keras.optimizers.schedules.CosineDecay(0.125, 40)
    data = make_data()
    watch = Watch(data)
    model = make_model(keras.optimizers.SGD(tfscale.ScalableSchedule(schedule)))
    model.fit(data, epochs=5, verbose=0, callbacks=[adaptive(data), watch])
    for epoch, (_, size, rate) in enumerate(watch.seen):
        # At the end of an epoch as many samples were seen as in 8 steps of 6 each.
        expected = float(schedule(8.0 * (epoch + 1))) * size / 6
        assert rate == pytest.approx(expected, rel=1e-5)


def test_velocities_follow_the_rate():
    def velocity(correct):
        data = make_data(batch_size=24)
        model = make_model(keras.optimizers.SGD(0.125, momentum=0.5))
        seen = []

        class Look(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if model.optimizer.built:
                    seen.append(model.optimizer.momentums[0].numpy())

        callback = adaptive(data, 48, start_batch_size=24, interval=1, momentum_correction=correct)
        model.fit(data, epochs=2, verbose=0, callbacks=[callback, Look()])
        return seen[-1]

    np.testing.assert_allclose(velocity(True), 2 * velocity(False), rtol=1e-6)


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("at", [(1, 3), (4, 0), (6, 1)])
def test_a_run_goes_on_bit_by_bit(tmp_path, at, has_schedule):
    """K is found in epoch 3 or later: theta's history, w_0 and the first loss must come along."""

    def train(name, *callbacks):
        rate = keras.optimizers.schedules.CosineDecay(0.02, 64) if has_schedule else 0.02
        rate = tfscale.ScalableSchedule(rate) if has_schedule else rate
        model = make_model(keras.optimizers.SGD(rate, momentum=0.5), dropout=0.3)
        data = make_data()
        own = adaptive(data, interval=(1, 3), log_path=tmp_path / name, decay_epochs=(7,))
        with contextlib.suppress(Interruption):
            model.fit(data, epochs=9, verbose=0, callbacks=[*callbacks, own])
        return model, (tmp_path / name).read_text()

    keras.config.set_floatx("float32")
    expected, lines = train("whole.jsonl")
    backup = str(tmp_path / "backup")
    train("cut.jsonl", BackupAndRestore(backup), InterruptAt(*at))
    resumed, own_lines = train("cut.jsonl", BackupAndRestore(backup))
    for got, wanted in zip(resumed.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert own_lines == lines
    assert len({json.loads(line)["batch_size"] for line in lines.splitlines()}) == 3


def test_a_second_fit_starts_afresh():
    data, model = make_data(), make_model()
    callback, watch = adaptive(data), Watch(data)
    for _ in range(2):
        model.fit(data, epochs=5, verbose=0, callbacks=[callback, watch])
    n = len(watch.seen) // 2
    assert n and watch.seen[0][-2:] != watch.seen[n - 1][-2:]
    assert [row[-2:] for row in watch.seen[:n]] == [row[-2:] for row in watch.seen[n:]]
    model.optimizer.learning_rate = 0.01  # who changes it in between means it
    model.fit(data, epochs=1, verbose=0, callbacks=[callback])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)


def test_a_model_that_is_not_built_is_built_from_the_data():
    data, model = make_data(), keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    first, look = [], keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: first.append(model.layers[0].kernel.shape)
    )  # fmt: skip
    history = model.fit(data, epochs=3, verbose=0, callbacks=[adaptive(data), look]).history
    assert history["batch_size"] == [6, 6, 12] and np.all(np.isfinite(history["theta"]))
    assert first == [(4, 1)]
