"""One session for each `fit`, shared by its callbacks; Synchronize does what Horovod's two do."""

import gc
import weakref
from unittest import mock

import pytest
import tensorflow as tf

from tests.helpers.models import LINE, line_model
from tests.helpers.single_job import single_job  # noqa: F401
from tfscale.callbacks import Callback, MetricAverageCallback, Synchronize
from tfscale.fit.session import running_session, session_of
from tfscale.fit.uneven_batches import GuardedStep


class Look(Callback):
    """Remembers the session of each epoch, after an action."""

    def __init__(self, action=lambda look: None):
        super().__init__()
        self.seen, self.action = [], action

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.action(self)
        self.seen.append(self.session)


def train(model, *callbacks, epochs=1):
    model.fit(LINE, LINE, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))


def test_callbacks_of_a_fit_share_a_session_and_the_next_fit_has_another():
    model, first, second = line_model(), Look(), Look()
    for _ in range(2):
        train(model, first, second, epochs=2)
    assert first.seen == second.seen and len(first.seen) == 4
    assert first.seen[0] is first.seen[1] is not first.seen[2]
    assert session_of(model) is first.seen[2] is first.seen[3]


def test_a_session_keeps_neither_the_model_alive_nor_what_serves_the_batches():
    """Python would wait for its threads for ever when it ends, and they for Python."""
    model, served = line_model(), []
    look = Look(lambda look: served.append(weakref.ref(look.session.call.epochs)))
    train(model, look, Synchronize())
    gc.collect()
    assert look.seen[0].call.epochs is None and served[0]() is None
    gone = weakref.ref(model)
    del model, look
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("is_other", [False, True])
def test_an_evaluation_inside_of_a_fit_begins_no_session(is_other):
    model, found = line_model(), []
    other = line_model() if is_other else model

    def evaluate(look):
        inside = [] if is_other else [look]  # the same callback in both
        callbacks = [MetricAverageCallback(), *inside]
        other.evaluate(LINE, LINE, verbose=0, callbacks=callbacks)
        found.append(running_session())

    look = Look(evaluate)
    train(model, look, epochs=2)
    assert look.seen == found and look.seen[0] is look.seen[1]
    assert running_session() is None


def test_a_fit_that_broke_off_leaves_nothing_to_the_next():
    model, broken = line_model(), Look(mock.Mock(side_effect=[RuntimeError("broken off"), None]))
    with pytest.raises(RuntimeError, match="broken off"):
        train(model, broken)
    before = broken.session
    train(model, broken)
    assert broken.seen[0] is not before and broken.seen[0].data is LINE


def test_hooks_that_are_called_by_hand_share_a_session_for_each_training():
    model, callbacks, seen = line_model(), [Look(), Look()], []
    for _ in range(2):
        for callback in callbacks:
            callback.set_model(model)
        for callback in callbacks:
            callback.on_train_begin()
        seen.append([callback.session for callback in callbacks])
        assert seen[-1][0] is seen[-1][1] and seen[-1][0].data is None
    assert seen[0][0] is not seen[1][0]


# Keras up to 3.15 begins a traced step without data; 3.16 looks for a batch first.
ENDS = {
    "Keras 3.15": tf.errors.OutOfRangeError(None, None, "End of sequence"),
    "Keras 3.16": StopIteration(),
}


@pytest.mark.parametrize("version", ENDS)
@pytest.mark.parametrize("is_distributed", [False, True])
def test_an_epoch_ends_with_its_data_in_each_version_of_keras(version, is_distributed, monkeypatch):
    monkeypatch.setattr("tfscale.exchange.batch_shares._are_used", is_distributed)
    model, session, logs = line_model(), mock.Mock(), {"loss": 1.0}
    function = mock.Mock(side_effect=[logs, ENDS[version]])
    step = GuardedStep(model, function, lambda _: session)
    assert step(iter(())) is logs
    with pytest.raises(type(ENDS[version])):
        step(iter(()))
    session.note_step.assert_called_once_with()
    session.end_of_data.assert_called_once_with()  # the step without data is not counted
    # As Keras's own optimizer counts a traced step that was begun.
    is_begun = is_distributed and version == "Keras 3.15"
    assert int(model.optimizer.iterations) == int(is_begun)
