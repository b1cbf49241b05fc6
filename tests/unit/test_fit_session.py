"""One session for each `fit`, shared by its callbacks; Synchronize does what Horovod's two do."""

import gc
import weakref

import pytest

from tests.helpers.fake_ranks import single_job  # noqa: F401
from tests.unit.test_callbacks_rank_zero import X, compiled
from tfscale.callbacks import Callback, MetricAverageCallback, Synchronize
from tfscale.fit.session import running_session, session_of


class Look(Callback):
    """Remembers the session of each training, and what it says of the `fit`."""

    def __init__(self, action=None):
        super().__init__()
        self.seen, self.action = [], action

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if self.action is not None:
            self.action(self)
        self.seen.append(self.session)


def test_callbacks_of_a_fit_share_a_session_and_the_next_fit_has_another():
    model, first, second = compiled(), Look(), Look()
    for _ in range(2):
        model.fit(X, X, batch_size=4, epochs=2, verbose=0, callbacks=[first, second])
    assert first.seen == second.seen and len(first.seen) == 4
    assert first.seen[0] is first.seen[1] is not first.seen[2]
    assert session_of(model) is first.seen[2] is first.seen[3]


def test_a_session_does_not_keep_what_serves_the_batches():
    """Python would wait for its threads for ever when it ends, and they for Python."""
    model, served = compiled(), []
    look = Look(lambda look: served.append(weakref.ref(look.session.call.epochs)))
    model.fit(X, X, verbose=0, callbacks=[look])
    gc.collect()
    assert look.seen[0].call.epochs is None and served[0]() is None


@pytest.mark.parametrize("is_other", [False, True])
def test_an_evaluation_inside_of_a_fit_begins_no_session(is_other):
    model, found = compiled(), []
    other = compiled() if is_other else model

    def evaluate(look):
        other.evaluate(X, X, verbose=0, callbacks=[MetricAverageCallback(), *inside])
        found.append(running_session())

    inside, look = [], Look(evaluate)
    inside += [] if is_other else [look]  # the same callback in both
    model.fit(X, X, epochs=2, verbose=0, callbacks=[look])
    assert look.seen == found and look.seen[0] is look.seen[1]
    assert running_session() is None


def test_a_fit_that_broke_off_leaves_nothing_to_the_next():
    model = compiled()

    def fail(look):
        raise RuntimeError("broken off")

    broken = Look(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        model.fit(X, X, verbose=0, callbacks=[broken])
    before = broken.session
    broken.action = None
    model.fit(X, X, verbose=0, callbacks=[broken])
    assert broken.seen[0] is not before and broken.seen[0].data is X


def test_hooks_that_are_called_by_hand_share_a_session_for_each_training():
    model, callbacks, seen = compiled(), [Look(), Look()], []
    for _ in range(2):
        for callback in callbacks:
            callback.set_model(model)
        for callback in callbacks:
            callback.on_train_begin()
        seen.append([callback.session for callback in callbacks])
        assert seen[-1][0] is seen[-1][1] and seen[-1][0].data is None
    assert seen[0][0] is not seen[1][0]


def test_a_session_keeps_no_model_alive():
    model = compiled()
    model.fit(X, X, verbose=0, callbacks=[Synchronize()])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
