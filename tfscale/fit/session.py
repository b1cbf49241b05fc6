"""One running `fit`: its arguments, its callbacks, and this rank's progress in it."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import process, runtime
from tfscale.data.dataset_batches import DatasetBatches, served_in
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import batch_shares as shares
from tfscale.fit import monitoring
from tfscale.fit.uneven_batches import Progress, StopTogether
from tfscale.internals import stack
from tfscale.internals.keras import set_callbacks
from tfscale.internals.optimizers import optimizer_of
from tfscale.internals.traits import Traits, arrange
from tfscale.measure import analysis
from tfscale.optimizer.distributed import distributed_of
from tfscale.trace import events

_STEPS_KEPT = 32
_EVENTS_KEPT = 1 << 16  # of these steps


class FitSession(Progress):
    """A `fit` on this rank, see `session_for`; `call` is empty where hooks are called by hand."""

    def __init__(self, model: keras.Model, call: stack.FitCall) -> None:
        super().__init__(model)
        self.call = call
        self.saves: Any = None  # the `SavePoints` of this `fit`, if there are any
        self.n_steps_before = 0  # of a resumed run, before its first epoch
        self._begin_within = (0, 0)  # the epoch in which it resumes, and its first step there
        self._joined: list[Any] = []
        # The last calls of the train function, for `tfscale run`; the first one traces.
        self._windows: deque[analysis.Window] = deque(maxlen=_STEPS_KEPT)
        self._n_calls = self._begin_ns = 0
        self._listener: events.Listener | None = None
        self.watch = monitoring.watch()  # None without metrics

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """All callbacks of the `fit`, in call order."""
        return self.call.callbacks

    def note_resumed(self, n_steps_before: int) -> None:
        """Record how many steps the run had made before the first epoch of this `fit`."""
        self.n_steps_before = n_steps_before

    def begin_within(self, epoch: int, first_step: int) -> None:
        """Record at which step of an epoch a resumed run begins."""
        self._begin_within = epoch, first_step
        self.watch_epoch(epoch)

    def watch_epoch(self, epoch: int) -> None:
        """Let the page of metrics show that an epoch begins, if there is one."""
        if self.watch is not None:
            self.watch.begin_epoch(epoch, self.data, self.first_step_of(epoch))

    def first_step_of(self, epoch: int) -> int:
        """The step with which an epoch begins: 0 unless a resumed run begins within it."""
        resumed, first_step = self._begin_within
        return first_step if epoch == resumed else 0

    def agree_on_saves(self, saves: Any) -> None:
        """Save at agreed points, or with None each rank for itself."""
        self.saves = saves

    @property
    def data(self) -> Any:
        """The `x` of the `fit`, or the batches that a callback serves in its place."""
        epochs = self.call.epochs
        served = None if epochs is None else served_in(epochs)
        return self.call.data if served is None else served

    @property
    def whole_batches(self) -> tf.data.Dataset | GlobalBatches | None:
        """The data of which all steps have a batch of all ranks; None if it has batches of ranks.

        All ranks read the batches of a dataset, to compute their rows, and `GlobalBatches` serve
        them with the slices if these may be uneven. With `tfscale.distribute` all data is read so.
        """
        data = self.data
        if isinstance(data, GlobalBatches):
            is_in_fit = self.call.epochs is not None and not shares.are_used()
            return data if is_in_fit and data.needs_weights else None
        return data.dataset if isinstance(data, DatasetBatches) and not data.is_sharded else None

    def add(self, callback: Traits) -> None:
        """Add a callback from the next hook on, in the place of an earlier one of its class."""
        callback.set_model(self.model)
        others = [other for other in self.callbacks if type(other) is not type(callback)]
        set_callbacks(self.call.callback_list, arrange([*others, callback]))

    def may_run_step(self) -> bool:
        """As for `Progress`; the call of the train function that begins now is timed."""
        may_run = super().may_run_step()
        self._begin_ns = events.clock_ns()
        return may_run

    def note_step(self) -> None:
        """Keep the times of a call of the train function that ends now."""
        self._n_calls += 1
        if self._n_calls == 1 and process.file_path() and events.has_events():
            # Not what is left at the end: a `CommunicationReport` takes events, too.
            self._listener = events.Listener(_EVENTS_KEPT)
        window = None
        if self._n_calls > 1 and (process.file_path() or self.watch is not None):
            times = (self._begin_ns, events.clock_ns())
            window = analysis.Window(self._n_calls, self.model.steps_per_execution, *times)
            self._windows.append(window)
        if self.watch is not None:
            self.watch.note_steps(self.model.steps_per_execution, window)

    def end_training(self) -> None:
        """As for `Progress`; give `tfscale run` the numbers of its closing lines."""
        super().end_training()
        if self.watch is not None:
            self.watch.end()
        windows, listener = list(self._windows), self._listener
        self._windows.clear()
        self._listener = None
        if windows and listener is not None:
            with contextlib.suppress(Exception):  # a job must not fail because of its report
                self._report(windows, listener)

    def _report(self, windows: list[analysis.Window], listener: events.Listener) -> None:
        steps = monitoring.step_rows(windows, listener, monitoring.before_of)

        def total(name: str) -> float:
            return sum(step[name] for step in steps)

        optimizer = distributed_of(optimizer_of(self.model))
        name = "" if optimizer is None else type(optimizer.strategy).__name__.lower()
        waiting = (total("exposed_s") + total("forward_wait_s")) / total("step_s")
        step_bytes = total("bytes") / total("n_steps")
        process.write_training(waiting, step_bytes, name or "none", runtime.backend().is_crowded)

    def stop_together(self) -> None:
        """Delay stops until all ranks know of them."""
        if self.call.callback_list is not None:
            self.add(StopTogether(self))


def join_list(callback: Traits) -> bool:
    """Arrange the list of callbacks that Keras calls, with the companions of one of them.

    Returns False outside of the methods of a list for the callback's model.
    """
    callback_list = stack.callback_list_around()
    if callback_list is None or callback_list.model is not callback.model:
        return False
    listed = callback_list.callbacks
    added = [c for c in callback.companions if c not in listed]
    arranged = arrange([*listed, *added])
    if arranged != listed:
        set_callbacks(callback_list, arranged)
    return True


# The sessions of models, by their ids; held by callbacks only. A session keeps its model alive.
_sessions: weakref.WeakValueDictionary[int, FitSession] = weakref.WeakValueDictionary()


def session_for(model: keras.Model, joining: Any = None) -> FitSession:
    """Return the session of the model's `fit` that is on the caller's stack.

    Outside of a `fit`, callbacks of one model whose hooks are called by hand share a session.
    `joining` is a callback whose training begins; it joins each session once.
    """
    call, session = stack.running_fit(), _sessions.get(id(model))
    if call.model is not model:
        call = stack.FitCall()
    is_same = session is not None and session.call.callback_list is call.callback_list
    if session is None or not is_same or (joining is not None and joining in session._joined):
        session = FitSession(model, call)
        _sessions[id(model)] = session
    if joining is not None:
        session._joined.append(joining)
    return session


def session_of(model: Any) -> FitSession | None:
    """Return the last session of a model, if any, without reading the stack."""
    return _sessions.get(id(model))


def running_session() -> FitSession | None:
    """Return the session of the innermost `fit` that runs around the caller, or None."""
    call = stack.running_fit()
    session = _sessions.get(id(call.model))
    is_its = session is not None and session.call.callback_list is call.callback_list
    return session if is_its else None
