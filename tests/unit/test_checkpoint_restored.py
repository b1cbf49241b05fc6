"""What a checkpoint gives back to whom: states of optimizers and of Keras's callbacks."""

import logging

import keras
import pytest

import tfscale
from tests.unit.checkpoint_model import (
    Act,
    build,
    fit,
    interrupt,
    job,  # noqa: F401
)
from tfscale.callbacks import Checkpoint
from tfscale.checkpoints.files import Part
from tfscale.checkpoints.resumable import read_counters, restore_counters
from tfscale.checkpoints.snapshot_restore import Reader
from tfscale.comm import runtime
from tfscale.config import ConfigError

optimizers, callbacks = keras.optimizers, keras.callbacks


def with_optimizer(optimizer):
    model = build()
    model.compile(tfscale.DistributedOptimizer(optimizer), "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            lambda: optimizers.Adam(0.01),
            lambda: optimizers.Adamax(0.01),
            r"Received: Adamax with 10 variables \(iteration, rate, momentum, norm\); the "
            r"checkpoint has Adam with 10 variables \(iteration, rate, momentum, velocity\)",
        ),
        (lambda: optimizers.Adagrad(0.01), lambda: optimizers.Lion(0.01), "Lion .* Adagrad"),
        (
            lambda: optimizers.RMSprop(0.01, centered=True),
            lambda: optimizers.RMSprop(0.01, momentum=0.9),
            r"velocity, momentum\); .* velocity, gradient\)",
        ),
        (
            lambda: optimizers.SGD(0.01),
            lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01)),
            "LossScaleOptimizer of SGD with 6 .* the checkpoint has SGD with 2",
        ),
    ],
)
def test_another_optimizer_of_as_many_variables_is_refused(tmp_path, before, after, text):
    fit(Checkpoint(tmp_path, 2), Act(3, interrupt), model=with_optimizer(before()))
    with pytest.raises(ConfigError, match=text):
        fit(Checkpoint(tmp_path, 2), model=with_optimizer(after()))
    assert len(fit(Checkpoint(tmp_path, 2), model=with_optimizer(before()))[1]) == 12 - 2


def test_numbers_go_to_the_same_one_of_the_same_class(caplog):
    """Wherever in the list it is; those that find no partner are named."""

    def waits(*values):
        made = []
        for kind, wait in values:
            callback = kind("loss")
            callback.wait = wait
            made.append(callback)
        return made

    stop, plateau = callbacks.EarlyStopping, callbacks.ReduceLROnPlateau
    here = [callbacks.ModelCheckpoint("m.keras"), *waits((stop, 1), (plateau, 2), (stop, 3))]
    states = read_counters(here)
    here = waits((plateau, 0), (stop, 0), (stop, 0), (plateau, 7))
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        restore_counters(here, states, is_own=True)
    assert [callback.wait for callback in here] == [2, 1, 3, 7]
    assert [record.getMessage() for record in caplog.records] == [
        "ReduceLROnPlateau on rank 0 counts from 0: its numbers were not saved.",
        "The numbers of ModelCheckpoint on rank 0 are not used: fit has no such callback.",
    ]
    caplog.clear()
    here = waits((stop, 0))
    restore_counters(here, states, is_own=False)  # another rank's: it may have had more
    assert here[0].wait == 1 and not caplog.records


def test_at_another_number_of_ranks_the_first_one_s_numbers_count(monkeypatch):
    parts = [Part({"groups": [[0, 1, 2]]}, {}) for _ in range(3)]
    for size, rank, source in ((3, 2, 2), (2, 1, 0), (4, 3, 0)):
        monkeypatch.setattr(runtime, "size", lambda size=size: size)
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        assert Reader(parts).source == source
