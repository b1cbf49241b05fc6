"""The callback Checkpoint in one process: when it saves, and how a run continues and ends."""

import logging
import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.checkpoint_model import (
    BATCH,
    STEPS,
    Act,
    Interruption,
    arrays,
    build,
    dataset,
    fit,
    info_of,
    interrupt,
    job,  # noqa: F401
    require_equal,
    resume,
    steps_in,
    values_of,
)
from tfscale import preemption
from tfscale.callbacks import Checkpoint, LearningRateScheduleCallback
from tfscale.checkpoints import files, list_checkpoints
from tfscale.checkpoints.files import Part, folder_name, write_part
from tfscale.checkpoints.saver import Saver
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.data.global_batches import continue_epoch
from tfscale.internals.stack import running_fit
from tfscale.testing import require_identical


def test_rhythms(tmp_path):
    expected = {
        "default": ({}, [12, 8, 4]),
        "epochs": ({"every_n_epochs": 2}, [12, 8]),
        "steps": ({"every_n_steps": 5, "keep": 9}, [12, 10, 5]),
        "both": ({"every_n_steps": 6, "every_n_epochs": 1, "keep": 9}, [12, 8, 6, 4]),
        "seconds": ({"every_seconds": 1e-9, "keep": 99}, list(range(12, 0, -1))),
        "rare": ({"every_seconds": 1e9}, [12]),
        "waits": ({"every_n_steps": 3, "keep": 2, "asynchronous": False}, [12, 9]),
    }
    for name, (options, steps) in expected.items():
        fit(Checkpoint(tmp_path / name, **options))
        assert steps_in(tmp_path / name) == steps, name
        assert not [p for p in (tmp_path / name).iterdir() if not p.name.startswith("step-")]


def test_no_more_than_one_checkpoint_above_keep(tmp_path, monkeypatch):
    """Also while one is written: disks are planned for it."""
    seen = []
    make = os.mkdir

    def counted(path, *words, **options):
        make(path, *words, **options)
        seen.append(len(list(tmp_path.glob("step-*"))))

    monkeypatch.setattr(os, "mkdir", counted)
    fit(Checkpoint(tmp_path, 1, keep=2))
    assert max(seen) == 3


@pytest.mark.parametrize(("stop", "is_built"), [(3, True), (4, True), (6, False), (11, True)])
def test_goes_on_amid_an_epoch(tmp_path, stop, is_built):
    """From the step before: bit by bit, dropout, metrics and optimizer too."""
    resume(tmp_path, stop, model=lambda: build(is_built=is_built))


def test_steps_that_are_traced_and_executed_together(tmp_path):
    options = {"run_eagerly": False, "steps_per_execution": 2}
    assert resume(tmp_path, 3, 2, model=lambda: build(**options)) == [2, 0, 2]
    options["steps_per_execution"] = 3
    fit(Checkpoint(tmp_path / "short", keep=9), model=build(**options))
    assert steps_in(tmp_path / "short") == [12, 8, 4]  # the last execution of each epoch is short


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_plain_dataset_goes_on_with_its_later_batches(tmp_path, is_counted):
    resume(tmp_path, 6, data=lambda: dataset(is_counted))


def test_validation_on_the_training_data_sees_all_of_it(tmp_path):
    def losses(*first, act=None):
        data = GlobalBatches(*arrays(), batch_size=BATCH, seed=2)
        model, _ = fit(list(first), act, data=data, epochs=2, validation_data=data)
        return model.history.history.get("val_loss")

    losses(Checkpoint(tmp_path, 1), act=Act(2, interrupt))
    assert losses(Checkpoint(tmp_path, 1)) == losses()


def test_callbacks_that_count_and_rates_that_follow_the_present_one(tmp_path):
    """The rate is halved once per epoch, not once more when an epoch is begun again."""
    whole, rest = [], []

    def more(noted):
        stop = keras.callbacks.EarlyStopping("loss", patience=9, mode="max")
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=2, mode="max", min_lr=1e-9)
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)

        def take_note(epoch, logs):
            rate = float(halve.model.optimizer.learning_rate)
            noted.append((epoch, rate, stop.wait, plateau.wait, stop.best))

        return [halve, stop, plateau, keras.callbacks.LambdaCallback(on_epoch_end=take_note)]

    model, _ = fit(None, epochs=5, more=more(whole))
    fit(Checkpoint(tmp_path, 1), Act(14, interrupt), epochs=5, more=more([]))
    again, _ = fit(Checkpoint(tmp_path, 1), epochs=5, more=more(rest))
    assert rest == whole[3:] and whole[3][2] > 1  # the count began before the restart
    require_equal(again, model)


class WithoutCall(keras.Model):
    """A `train_step` and no `call`, and noise that no layer's generator draws."""

    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            noisy = x + keras.random.normal(tf.shape(x), dtype=x.dtype)
            loss = tf.reduce_mean((self.dense(noisy) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_goes_on_amid_an_epoch_of_a_model_without_call(tmp_path):
    def built():
        keras.utils.clear_session()  # and Keras's global generator, as in a new process
        keras.utils.set_random_seed(1)
        model = WithoutCall()
        model.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
        return model

    resume(tmp_path, 6, model=built)


@pytest.mark.parametrize("is_built", [True, False])
def test_rates_of_an_epoch_that_goes_on(tmp_path, is_built):
    """Rates set when the epoch began are kept, also if the data build the model."""
    rates = [LearningRateScheduleCallback(0.1, lambda epoch: 0.1**epoch)]
    resume(tmp_path / "after", 6, 2, model=lambda: build(is_built=is_built), more=rates)
    halve = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]
    resume(tmp_path / "in front", 6, model=lambda: build(is_built=is_built), front=halve)


def test_nothing_left_to_train(tmp_path):
    model, _ = fit(Checkpoint(tmp_path))
    data = GlobalBatches(*arrays(), batch_size=BATCH // 2, seed=2)
    again, batches = fit(Checkpoint(tmp_path), data=data)
    assert (batches, data.epoch, data.batch_size) == ([], 3, BATCH // 2)
    require_equal(again, model)
    longer, batches = fit(Checkpoint(tmp_path), epochs=4)
    assert len(batches) == STEPS
    require_equal(longer, fit(None, epochs=4)[0])
    with pytest.raises(ConfigError, match="must be built, as no training is left"):
        fit(Checkpoint(tmp_path), model=build(is_built=False))


def test_nothing_left_of_averages(tmp_path):
    """Keras sets weights to their averages when training ends, also if it never began."""
    ended = []
    for _ in range(2):
        model = build(optimizer=keras.optimizers.SGD(0.01, use_ema=True))
        model.fit(*arrays(), epochs=2, verbose=0, callbacks=[Checkpoint(tmp_path)])
        ended.append(model)
    require_equal(*ended)


def test_a_fit_after_a_resumed_one_begins_with_its_own_epoch(tmp_path):
    fit(Checkpoint(tmp_path), epochs=2)
    model, _ = fit(Checkpoint(tmp_path), Act(1, interrupt), epochs=3)
    assert model.fit(*arrays(), verbose=0).epoch == [0]


def test_training_goes_on_while_files_are_written(tmp_path, monkeypatch):
    """The file of step 2 is not written before another step has begun, and holds step 2."""
    write, later = files.write_part, threading.Event()

    def slow(folder, rank, part):
        if part.info["step"] == 2:
            assert later.wait(60)
        write(folder, rank, part)

    monkeypatch.setattr(files, "write_part", slow)
    at_two = []
    model = build()

    class Look(Act):
        def on_train_batch_begin(self, batch, logs=None):
            super().on_train_batch_begin(batch)
            if len(self.batches) == 3:
                at_two.extend(values_of(model))
            if len(self.batches) == 4:
                assert steps_in(tmp_path) == []
                later.set()
            if len(self.batches) == 5:
                raise Interruption

    fit(Checkpoint(tmp_path, 2, keep=1), Look(-1, interrupt), model=model)
    assert steps_in(tmp_path) == [4, 2]
    newest = list_checkpoints(tmp_path)[0]
    newest.path.rename(tmp_path / "elsewhere")
    after = []
    fit(Checkpoint(tmp_path, 99), Act(0, lambda: after.extend(values_of(model))), model=model)
    require_identical(after, at_two)


def test_a_fit_waits_for_what_an_interrupted_one_writes(tmp_path, monkeypatch):
    write, is_late = files.write_part, threading.Event()

    def write_late(*what):
        assert is_late.wait(60)
        write(*what)

    def train(every_n_steps, act):
        data = GlobalBatches(*arrays(), batch_size=BATCH)
        build().fit(data, verbose=0, callbacks=[Checkpoint(tmp_path, every_n_steps), act])

    monkeypatch.setattr(files, "write_part", write_late)
    with pytest.raises(Interruption):
        train(2, Act(3, interrupt))
    assert not steps_in(tmp_path)
    wait = Saver.wait_for_earlier

    def wait_for_it(saver):
        threading.Timer(0.5, is_late.set).start()
        wait(saver)

    monkeypatch.setattr(Saver, "wait_for_earlier", wait_for_it)
    rest = Act(-1, interrupt)
    train(99, rest)
    assert rest.batches == [2, 3]


def with_nan_in_the_last_row():
    x, y = arrays()
    y[-1] = np.nan
    return GlobalBatches(x, y, batch_size=BATCH, shuffle=False)


def test_nan_in_the_last_step_of_an_epoch_is_not_saved(tmp_path, caplog):
    """Nor where the job is asked to make room then."""
    fit(Checkpoint(tmp_path, keep=1), epochs=1)
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        data, more = with_nan_in_the_last_row(), [keras.callbacks.TerminateOnNaN()]
        fit(Checkpoint(tmp_path, keep=1), epochs=3, data=data, more=more)
    assert steps_in(tmp_path) == [4]
    assert "not saved: weights of ranks [0] are not finite" in caplog.text
    act = Act(3, preemption.request_save_and_stop)
    with pytest.raises(SystemExit):
        fit(Checkpoint(tmp_path / "asked"), act, epochs=2, data=with_nan_in_the_last_row())
    assert steps_in(tmp_path / "asked") == []
    assert "tfscale: stopped, as requested; no checkpoint was written." in caplog.text


def test_a_skipped_step_leaves_a_model_that_is_saved(tmp_path):
    model = build(optimizer=keras.optimizers.Adam(0.01), nonfinite="skip")
    data, more = with_nan_in_the_last_row(), [keras.callbacks.TerminateOnNaN()]
    fit(Checkpoint(tmp_path), model=model, data=data, more=more)
    assert steps_in(tmp_path) == [4]
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_what_stops_an_epoch_of_unknown_length_is_no_end(tmp_path):
    """Unlike a callback in front that stops at the end of an epoch."""
    model = build()

    def stop(is_now=True):
        model.stop_training = is_now

    at_end = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: stop(epoch == 1))
    fit(Checkpoint(tmp_path / "within", 4), Act(6, stop), model=model, data=dataset(False))
    assert steps_in(tmp_path / "within") == [4]
    model = build()
    fit([at_end, Checkpoint(tmp_path / "end")], model=model, data=dataset(False))
    assert steps_in(tmp_path / "end") == [8, 4]


def test_parts_of_other_ranks_are_not_deleted_before_rank_0_writes_its_own(tmp_path, monkeypatch):
    """They may begin as soon as rank 0 has agreed, while it still deletes old checkpoints."""
    checkpoint, finish, seen = Checkpoint(tmp_path, 2), Saver.finish, []

    def finish_late(saver):
        other = tmp_path / folder_name(2, checkpoint._run)
        if not seen:  # as rank 1 of two would have it by now
            write_part(other, 1, Part(info_of(2, run=checkpoint._run), {}))
        finish(saver)
        seen.append((other / "rank-00001.manifest").exists())

    monkeypatch.setattr(Saver, "finish", finish_late)
    fit(checkpoint, Act(3, interrupt))
    assert seen == [True]


BATCHES = 6


def six_batches(is_dataset=False):
    x, y = (array[: BATCHES * 4] for array in arrays())
    if is_dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    return {"x": x, "y": y, "batch_size": 4, "shuffle": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"steps_per_epoch": 6}, (1, 7)),
        ({"steps_per_epoch": 3}, (1, 4, 7)),
        ({"steps_per_epoch": 2}, (1, 3, 4)),
        # Keras takes whole executions: an epoch of 3 steps, 2 at a time, takes 4 batches.
        ({"steps_per_epoch": 3, "together": 2}, (2, 3)),
        ({"steps_per_epoch": 4, "together": 2}, (2, 3)),
        ({"steps_per_epoch": 3, "initial_epoch": 5, "epochs": 8}, (1, 4)),
        ({"steps_per_epoch": 3, "is_dataset": True}, (5,)),
    ],
)
def test_steps_of_several_epochs_from_one_pass_go_on_where_it_was(tmp_path, options, stops):
    options = {"together": 1, "is_dataset": False, **options}
    together, is_dataset = options.pop("together"), options.pop("is_dataset")
    for stop in stops:
        rest = resume(
            tmp_path / f"{stop}", stop,
            model=lambda: build(steps_per_execution=together),
            data=lambda: six_batches(is_dataset), **options,
        )  # fmt: skip
        assert together > 1 or len(rest) == 3 * options["steps_per_epoch"] - stop


@pytest.mark.slow
def test_batches_of_another_size_than_fit_begins_with(tmp_path):
    """Keras counts the steps of the program's batches until the epoch begins."""
    four, eight = (GlobalBatches(*arrays(), batch_size=n) for n in (4, 8))
    fit(Checkpoint(tmp_path, 1), Act(6, interrupt), data=four, epochs=2)
    model, rest = fit(Checkpoint(tmp_path, 1), data=eight, epochs=2)  # 4 steps: fewer than made
    assert rest == [6, 7, *range(8)]
    assert int(model.optimizer.iterations) == 16


@pytest.mark.slow
def test_an_epoch_that_became_shorter_has_a_step_left():
    """Shares of more ranks are smaller: an epoch without a step would log a loss of 0."""
    seen = []

    def resume_late(epoch, logs):
        if epoch == 1:
            seen.append(continue_epoch(running_fit().epochs, epoch, BATCHES + 3))

    late = keras.callbacks.LambdaCallback(on_epoch_begin=resume_late)
    for per_epoch, expected in ((None, [*range(BATCHES), BATCHES - 1]), (4, [0, 1, 2, 3, 1])):
        options = {"data": six_batches(), "steps_per_epoch": per_epoch, "epochs": 2}
        model, numbers = fit(late, **options)
        assert numbers == expected and min(model.history.history["loss"]) > 0
    assert seen == [BATCHES - 1, 1]  # the second epoch of four has two steps
