"""One running `fit`: its arguments, its callbacks, and this rank's progress in it."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from tfscale.fit.uneven_batches import Progress, StopTogether
from tfscale.internals import stack
from tfscale.internals.keras import set_callbacks


class FitSession(Progress):
    """A `fit` on this rank, see `session_for`; `call` is empty where hooks are called by hand."""

    def __init__(self, model: keras.Model, call: stack.FitCall) -> None:
        super().__init__(model)
        self.call = call
        self.saves: Any = None  # the `SavePoints` of this `fit`, if there are any
        self._joined: list[Any] = []
        self._stops_together = False

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """All callbacks of the `fit`, in call order."""
        return self.call.callbacks

    @property
    def data(self) -> Any:
        """The `x` of the `fit`."""
        return self.call.data

    def put_first(self, callback: keras.callbacks.Callback) -> None:
        """Put or move a callback before all others, from the next hook on."""
        others = [other for other in self.callbacks if other is not callback]
        set_callbacks(self.call.callback_list, [callback, *others])

    def stop_together(self) -> None:
        """Put a `StopTogether` after all callbacks, once."""
        if not self._stops_together and self.call.callback_list is not None:
            self._stops_together = True
            stop = StopTogether(self)
            stop.set_model(self.model)
            set_callbacks(self.call.callback_list, [*self.callbacks, stop])


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
    """Return the session of the innermost `fit` on the caller's stack, of any model."""
    call = stack.running_fit()
    session = _sessions.get(id(call.model))
    is_its = session is not None and session.call.callback_list is call.callback_list
    return session if is_its else None
