"""Reads of the Python stack: the `fit`, `evaluate` or `predict` that runs around the caller.

Keras tells a PyDataset that a pass begins, but not what for, and tells a callback nothing of the
data. An evaluation must not move the order of the training epochs, an epoch number given by
`initial_epoch` must be kept, and both must come out the same on all ranks whatever runs in between.
The call stack is the one place where this is known exactly.

Read are the local variables `self`, `x`, `batch_size`, `validation_data`, `class_weight`,
`initial_epoch`, `callbacks`, `epoch_iterator` and `epoch` of `Model.fit`, `callbacks` and
`epoch_iterator` of `evaluate` and `predict`, and `self` of the methods of data adapters and of a
LossScaleOptimizer.
Checked with Keras 3.10 and 3.15.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras

from tfscale.config import ConfigError

_ADAPTER_METHODS = ("on_epoch_begin", "on_epoch_end", "num_batches", "get_tf_dataset")
_TRAINERS = {
    inspect.unwrap(getattr(keras.Model, name)).__code__: name
    for name in ("fit", "evaluate", "predict")
}


@dataclasses.dataclass(frozen=True)
class FitCall:
    """A running `fit`: what it was given, and what Keras made of it.

    Attributes:
        data: Its `x`.
        initial_epoch: As given, until the first epoch begins.
        epochs_of: Returns Keras's iterator of epochs; None before it is made, and after the `fit`.
            One that lived until Python ends would wait for ever for threads that need Python.
        callback_list: Keras's list; what the user gave before it is made.
    """

    model: Any = None
    data: Any = None
    batch_size: int | None = None
    validation_data: Any = None
    class_weight: Any = None
    initial_epoch: int = 0
    epochs_of: Callable[[], Any] = lambda: None
    callback_list: Any = None

    @property
    def epochs(self) -> Any:
        """Keras's iterator of epochs, while the `fit` runs."""
        return self.epochs_of()

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """All callbacks, in the order of their calls."""
        return list(_callbacks_in(self.callback_list))


@dataclasses.dataclass(frozen=True)
class KerasPass:
    """One pass over data, which begins or ends.

    Attributes:
        adapter: Keras's adapter between the data and its loop; None if user code called.
        caller: "fit", "evaluate", "predict": the innermost that runs; None without one.
        callbacks: Those of the caller.
        epoch: Keras's number of the epoch; None unless `fit` is in its epoch loop.
        refused: Name of an argument of `fit` that contradicts the data; None if there is none.
        fit: The innermost `fit`, perhaps around an evaluation; None without one.
    """

    adapter: Any = None
    caller: str | None = None
    callbacks: tuple[Any, ...] = ()
    epoch: int | None = None
    refused: str | None = None
    fit: FitCall | None = None

    def keep_order(self) -> None:
        """Stop Keras from shuffling the steps: it would do so differently on each rank."""
        if self.adapter is not None:
            self.adapter.shuffle = False

    def require_whole_epochs(self) -> None:
        """Raise where an argument of `fit` contradicts the data."""
        if self.refused is not None:
            raise ConfigError(
                "An epoch is one pass over the data, in the data's own batches. Received: "
                f"{self.refused}. Leave it out, and give GlobalBatches what you need."
            )

    @property
    def is_training(self) -> bool:
        """Whether the samples of this pass are trained on."""
        if self.caller is None:
            return True
        return self.caller == "fit" and self.epoch is not None


def current_pass() -> KerasPass:
    """Return the innermost adapter, trainer method and `fit` that run around the caller."""
    adapter: Any = None
    fit = running_fit()
    found: dict[str, Any] = {"fit": None if fit.model is None else fit}
    for frame in _frames():
        name = _TRAINERS.get(frame.f_code)
        if name is not None:
            given = frame.f_locals
            found |= {"caller": name, "callbacks": _callbacks_in(given.get("callbacks"))}
            if name == "fit":
                found |= {"epoch": given.get("epoch"), "refused": _refused(given)}
            break
        adapter = adapter or _adapter_of(frame)
    return KerasPass(adapter, **found)


def running_fit() -> FitCall:
    """Return the innermost `fit` that runs around the caller; an empty one outside of any."""
    for frame in _frames():
        if _TRAINERS.get(frame.f_code) == "fit":
            given = frame.f_locals
            epochs = given.get("epoch_iterator")
            return FitCall(
                model=given["self"],
                data=given.get("x"),
                batch_size=given.get("batch_size"),
                validation_data=given.get("validation_data"),
                class_weight=given.get("class_weight"),
                initial_epoch=given.get("initial_epoch") or 0,
                epochs_of=(lambda: None) if epochs is None else weakref.ref(epochs),
                callback_list=given.get("callbacks"),
            )
    return FitCall()


def running_passes() -> list[Any]:
    """Return Keras's iterators of epochs, one for each running trainer method, innermost first."""
    running = [frame for frame in _frames() if frame.f_code in _TRAINERS]
    found = [frame.f_locals.get("epoch_iterator") for frame in running]
    return [iterator for iterator in found if iterator is not None]


def owners_around() -> Iterator[Any]:
    """Yield the `self` of each function that runs around the caller, None where there is none."""
    for frame in _frames():
        yield frame.f_locals.get("self")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _callbacks_in(callback_list: Any) -> tuple[Any, ...]:
    return tuple(getattr(callback_list, "callbacks", ()))


def _refused(given: dict[str, Any]) -> str | None:
    if getattr(given.get("epoch_iterator"), "steps_per_epoch", None):
        return "steps_per_epoch"
    return "batch_size" if given.get("batch_size") is not None else None


def _adapter_of(frame: FrameType) -> Any:
    """Return the Keras adapter whose method runs in `frame`, or None.

    Only these frames' locals are read: reading them keeps what they hold alive.
    """
    if frame.f_code.co_name not in _ADAPTER_METHODS:
        return None
    owner = frame.f_locals.get("self")
    return owner if isinstance(getattr(owner, "py_dataset", None), keras.utils.PyDataset) else None
