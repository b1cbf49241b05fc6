"""What a checkpoint gives back to whom: states of optimizers and of Keras's callbacks."""

import logging
from types import SimpleNamespace

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
from tfscale.callbacks import Checkpoint, checkpoint_callbacks
from tfscale.callbacks import checkpoint as module
from tfscale.callbacks.checkpoint_callbacks import (
    read_keras_callbacks,
    restore_keras_callbacks,
    set_numbers,
)
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


def test_a_checkpoint_that_does_not_name_its_optimizer(tmp_path, monkeypatch, caplog):
    write = module.write_part

    def without(folder, rank, part):
        del part.info["rules"]
        write(folder, rank, part)

    monkeypatch.setattr(module, "write_part", without)
    fit(Checkpoint(tmp_path, 2), Act(3, interrupt))
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        assert len(fit(Checkpoint(tmp_path, 2))[1]) == 12 - 2
    assert "does not say which optimizer it is of" in caplog.text
    model = with_optimizer(optimizers.SGD(0.01))
    with pytest.raises(ConfigError, match=r"has one with 10 variables \(of unknown meaning\)"):
        fit(Checkpoint(tmp_path, 2), model=model)


def test_numbers_go_to_the_same_one_of_the_same_class(monkeypatch, caplog):
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
    monkeypatch.setattr(checkpoint_callbacks, "callbacks_of_fit", lambda: here)
    states = read_keras_callbacks()
    here = waits((plateau, 0), (stop, 0), (stop, 0), (plateau, 7))
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        set_numbers(states, is_own=True)
    assert [callback.wait for callback in here] == [2, 1, 3, 7]
    assert [record.getMessage() for record in caplog.records] == [
        "ReduceLROnPlateau on rank 0 counts anew: its numbers are not among those that were saved.",
        "Nobody goes on with what ModelCheckpoint on rank 0 had counted: fit has no such callback.",
    ]
    caplog.clear()
    here = waits((stop, 0))
    set_numbers(states, is_own=False)  # another rank's: it may have had more
    assert here[0].wait == 1 and not caplog.records


def test_at_another_number_of_ranks_the_first_one_s_numbers_count(monkeypatch):
    stop = callbacks.EarlyStopping("loss")
    monkeypatch.setattr(checkpoint_callbacks, "callbacks_of_fit", lambda: [stop])
    infos = []
    for wait in (4, 5):
        stop.wait = wait
        infos.append({"keras_callbacks": read_keras_callbacks()})
    restore_keras_callbacks(SimpleNamespace(size=2, infos=infos))
    assert stop.wait == 4
