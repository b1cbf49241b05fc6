"""The callback Checkpoint in one process: when it saves, and how a run continues and ends."""

import logging
import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.unit.checkpoint_model import (
    BATCH,
    STEPS,
    Act,
    Interruption,
    arrays,
    build,
    fit,
    interrupt,
    job,  # noqa: F401
    require_equal,
    steps_in,
    values_of,
)
from tfscale import preemption
from tfscale.callbacks import Checkpoint
from tfscale.checkpoints import files, list_checkpoints
from tfscale.checkpoints.files import Part, folder_name, write_part
from tfscale.checkpoints.saver import Saver
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches


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


@pytest.mark.parametrize(
    ("stop", "is_built"), [(3, True), (4, True), (6, False), (7, True), (11, True)]
)
def test_goes_on_amid_an_epoch(tmp_path, stop, is_built):
    """From the step before: bit by bit, dropout, metrics and optimizer too."""
    whole, numbers = fit(None, model=build(is_built=is_built))
    fit(Checkpoint(tmp_path, 1), Act(stop, interrupt), model=build(is_built=is_built))
    assert steps_in(tmp_path)[0] == stop
    model, rest = fit(Checkpoint(tmp_path, 1), model=build(is_built=is_built))
    require_equal(model, whole)
    assert rest == numbers[stop:]


def test_steps_that_are_traced_and_executed_together(tmp_path):
    options = {"run_eagerly": False, "steps_per_execution": 2}
    whole, numbers = fit(None, model=build(**options))
    fit(Checkpoint(tmp_path, 2), Act(3, interrupt), model=build(**options))
    model, rest = fit(Checkpoint(tmp_path, 2), model=build(**options))
    require_equal(model, whole)
    assert rest == numbers[3:] == [2, 0, 2]
    fit(
        Checkpoint(tmp_path / "short", keep=9), model=build(**{**options, "steps_per_execution": 3})
    )
    assert steps_in(tmp_path / "short") == [12, 8, 4]  # the last execution of each epoch is short


def test_a_plain_dataset_goes_on_with_its_later_batches(tmp_path):
    def data():
        return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)

    for name, make in {"counted": data, "unknown": lambda: data().filter(lambda *_: True)}.items():
        whole, numbers = fit(None, data=make())
        fit(Checkpoint(tmp_path / name, 1), Act(6, interrupt), data=make())
        model, rest = fit(Checkpoint(tmp_path / name, 1), data=make())
        require_equal(model, whole)
        assert rest == numbers[6:]


def test_validation_on_the_training_data_sees_all_of_it(tmp_path):
    def run(act=None, checkpoint=None):
        model, data = build(), GlobalBatches(*arrays(), batch_size=BATCH, seed=2)
        callbacks = [c for c in (checkpoint, act) if c]
        try:
            history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks,
                                validation_data=data)  # fmt: skip
        except Interruption:
            return []
        return history.history["val_loss"]

    expected = run()
    run(Act(2, interrupt), Checkpoint(tmp_path, 1, asynchronous=False))
    assert run(checkpoint=Checkpoint(tmp_path, 1)) == expected


def test_callbacks_that_count_and_rates_that_follow_the_present_one(tmp_path):
    """The rate is halved once per epoch, not once more when an epoch is begun again."""
    whole, rest = [], []

    def more(noted):
        class Note(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                rate = float(self.model.optimizer.learning_rate)
                noted.append((epoch, rate, stop.wait, plateau.wait, stop.best))

        stop = keras.callbacks.EarlyStopping("loss", patience=9, mode="max")
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=2, mode="max", min_lr=1e-9)
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        return [halve, stop, plateau, Note()]

    model = build()
    fit(None, model=model, epochs=5, more=more(whole))
    fit(Checkpoint(tmp_path, 1), Act(14, interrupt), epochs=5, more=more([]))
    again, _ = fit(Checkpoint(tmp_path, 1), epochs=5, more=more(rest))
    assert rest == whole[3:] and whole[3][2] > 1  # the count began before the restart
    require_equal(again, model)


def test_nothing_left_to_train(tmp_path):
    model, _ = fit(Checkpoint(tmp_path))
    again, batches = fit(Checkpoint(tmp_path))
    assert batches == []
    require_equal(again, model)
    longer, batches = fit(Checkpoint(tmp_path), epochs=4)
    assert len(batches) == STEPS
    require_equal(longer, fit(None, epochs=4)[0])
    with pytest.raises(ConfigError, match="must be built where nothing is left"):
        fit(Checkpoint(tmp_path), model=build(is_built=False))


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
    for own, theirs in zip(after, at_two, strict=True):
        np.testing.assert_array_equal(own, theirs)


def with_nan_in_the_last_row():
    x, y = arrays()
    y[-1] = np.nan
    return GlobalBatches(x, y, batch_size=BATCH, shuffle=False)


def test_nan_in_the_last_step_of_an_epoch_is_not_saved(tmp_path, caplog):
    sound = GlobalBatches(*arrays(), batch_size=BATCH)
    fit(Checkpoint(tmp_path, keep=1), epochs=1, data=sound)
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        data, more = with_nan_in_the_last_row(), [keras.callbacks.TerminateOnNaN()]
        fit(Checkpoint(tmp_path, keep=1), epochs=3, data=data, more=more)
    assert steps_in(tmp_path) == [4]
    assert "not saved: weights of ranks [0] are not finite" in caplog.text


def test_who_must_make_room_does_not_save_it_either(tmp_path):
    act = Act(3, preemption.request_save_and_stop)
    with pytest.raises(SystemExit):
        fit(Checkpoint(tmp_path), act, epochs=2, data=with_nan_in_the_last_row())
    assert steps_in(tmp_path) == []


def test_a_skipped_step_leaves_a_model_that_is_saved(tmp_path):
    model = build()
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.Adam(0.01), nonfinite="skip")
    model.compile(optimizer, "mse", run_eagerly=True)
    data, more = with_nan_in_the_last_row(), [keras.callbacks.TerminateOnNaN()]
    fit(Checkpoint(tmp_path), model=model, data=data, more=more)
    assert steps_in(tmp_path) == [4]
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_parts_of_other_ranks_are_not_deleted_before_rank_0_writes_its_own(tmp_path, monkeypatch):
    """They may begin as soon as rank 0 has agreed, while it still deletes old checkpoints."""
    checkpoint, finish, seen = Checkpoint(tmp_path, 2), Saver.finish, []

    def finish_late(saver):
        other = tmp_path / folder_name(2, checkpoint._run)
        if not seen:  # as rank 1 of two would have it by now
            write_part(other, 1, Part({"run": checkpoint._run, "step": 2, "size": 2}, {}))
        finish(saver)
        seen.append((other / "rank-00001.manifest").exists())

    monkeypatch.setattr(Saver, "finish", finish_late)
    fit(checkpoint, Act(3, interrupt))
    assert seen == [True]
