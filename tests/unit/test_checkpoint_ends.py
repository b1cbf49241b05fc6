"""What the end of training saves, where the model is broken by then or only its loss is."""

import logging

import keras
import numpy as np
import pytest

import tfscale
from tests.unit.checkpoint_model import (
    BATCH,
    Act,
    arrays,
    build,
    fit,
    interrupt,
    job,  # noqa: F401
    steps_in,
)
from tfscale import preemption
from tfscale.callbacks import Checkpoint
from tfscale.checkpoints import saver as module
from tfscale.checkpoints.files import Part, folder_name, write_part
from tfscale.checkpoints.saver import Saver
from tfscale.data import GlobalBatches


def with_nan_in_the_last_row():
    x, y = arrays()
    y[-1] = np.nan
    return GlobalBatches(x, y, batch_size=BATCH, shuffle=False)


def test_nan_in_the_last_step_of_an_epoch_is_not_saved(tmp_path, caplog):
    sound = GlobalBatches(*arrays(), batch_size=BATCH)
    fit(Checkpoint(tmp_path, keep=1), epochs=1, data=sound)
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        fit(
            Checkpoint(tmp_path, keep=1),
            epochs=3,
            data=with_nan_in_the_last_row(),
            more=[keras.callbacks.TerminateOnNaN()],
        )
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
    fit(
        Checkpoint(tmp_path),
        model=model,
        data=with_nan_in_the_last_row(),
        more=[keras.callbacks.TerminateOnNaN()],
    )
    assert steps_in(tmp_path) == [4]
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_what_one_rank_says_counts_for_all(monkeypatch):
    """Each sees its own share of the data, and some have weights of their own."""
    agree = module.agree_on_end
    for others, expected in {
        (True, False, False): (True, False),
        (True, False, True): (False, False),
        (False, True, True): (False, True),
    }.items():
        monkeypatch.setattr(
            module.objects,
            "allgather_object",
            lambda own, name, others=others: [own, others],
        )
        assert agree(False, False) == expected


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
