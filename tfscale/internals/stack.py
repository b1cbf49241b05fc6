"""Reads of the Python stack: the `fit`, `evaluate` or `predict` that is calling.

Keras notifies a PyDataset that a pass begins, but not whether it is for training, and does not give
callbacks the data. An evaluation must not change the order of the training epochs, an epoch number
given by `initial_epoch` must be kept, and both must be the same on all ranks. Only the call stack
has this information.

These local variables are read: `self`, `x`, `batch_size`, `validation_data`, `class_weight`,
`initial_epoch`, `callbacks`, `epoch_iterator` and `epoch` of `Model.fit`, `callbacks` and
`epoch_iterator` of `evaluate` and `predict`, and `self` of the methods of data adapters, of a
CallbackList and of a LossScaleOptimizer.
Checked with Keras 3.10 and 3.15.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
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

_LIST_METHODS = {
    method.__code__
    for method in vars(keras.callbacks.CallbackList).values()
    if inspect.isfunction(method)
}


@dataclasses.dataclass(frozen=True)
class FitCall:
    """The arguments of a running `fit`, and the objects that Keras made of them."""

    model: Any = None
    data: Any = None  # the argument `x`
    batch_size: int | None = None
    validation_data: Any = None
    class_weight: Any = None
    initial_epoch: int = 0
    # Returns Keras's iterator of epochs; None before it exists, and after the `fit`. A weak
    # reference: an iterator that lived until Python exits would wait forever for its threads.
    epochs_of: Callable[[], Any] = lambda: None
    callback_list: Any = None  # Keras's list; the user's argument before that exists

    @property
    def epochs(self) -> Any:
        """Keras's iterator of epochs, while the `fit` runs."""
        return self.epochs_of()

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """All callbacks, in call order."""
        return list(_callbacks_in(self.callback_list))


@dataclasses.dataclass(frozen=True)
class KerasPass:
    """A pass of Keras over data, seen where it begins or ends."""

    adapter: Any = None  # Keras's adapter between the data and its loop; None if user code called
    epochs: Any = None  # Keras's iterator of epochs, of the caller
    caller: str | None = None  # the innermost of "fit", "evaluate", "predict" that runs
    callbacks: tuple[Any, ...] = ()  # of the caller
    epoch: int | None = None  # Keras's number of the epoch; None outside of `fit`'s epoch loop
    refused: str | None = None  # name of an argument of `fit` that contradicts the data
    fit: FitCall | None = None  # the innermost `fit`, perhaps around an evaluation

    def keep_order(self) -> None:
        """Stop Keras from shuffling the steps, which it would do differently on each rank."""
        if self.adapter is not None:
            self.adapter.shuffle = False

    def require_whole_epochs(self) -> None:
        """Raise if an argument of `fit` contradicts the data."""
        if self.refused is not None:
            raise ConfigError(
                f"{self.refused} must be left out: an epoch is one pass over the data. Received: "
                f"{self.refused}. Give GlobalBatches what you need."
            )

    @property
    def is_training(self) -> bool:
        """Whether the samples of this pass are trained on."""
        if self.caller is None:
            return True
        return self.caller == "fit" and self.epoch is not None


def current_pass() -> KerasPass:
    """Return the pass of the innermost adapter, trainer method and `fit` on the caller's stack."""
    adapter: Any = None
    fit = running_fit()
    facts: dict[str, Any] = {"fit": None if fit.model is None else fit}
    for frame in _frames():
        name = _TRAINERS.get(frame.f_code)
        if name is not None:
            frame_locals = frame.f_locals
            facts |= {"caller": name, "callbacks": _callbacks_in(frame_locals.get("callbacks"))}
            facts["epochs"] = frame_locals.get("epoch_iterator")
            if name == "fit":
                facts |= {"epoch": frame_locals.get("epoch"), "refused": _refused(frame_locals)}
            break
        adapter = adapter or _adapter_of(frame)
    return KerasPass(adapter, **facts)


def running_fit() -> FitCall:
    """Return the innermost `fit` on the caller's stack; an empty `FitCall` if there is none."""
    for frame in _frames():
        if _TRAINERS.get(frame.f_code) == "fit":
            frame_locals = frame.f_locals
            epochs = frame_locals.get("epoch_iterator")
            return FitCall(
                model=frame_locals["self"],
                data=frame_locals.get("x"),
                batch_size=frame_locals.get("batch_size"),
                validation_data=frame_locals.get("validation_data"),
                class_weight=frame_locals.get("class_weight"),
                initial_epoch=frame_locals.get("initial_epoch") or 0,
                epochs_of=(lambda: None) if epochs is None else weakref.ref(epochs),
                callback_list=frame_locals.get("callbacks"),
            )
    return FitCall()


def callback_list_around() -> Any:
    """Return the CallbackList that runs a method around the caller, the innermost; or None."""
    frames = (frame for frame in _frames() if frame.f_code in _LIST_METHODS)
    return next((frame.f_locals["self"] for frame in frames), None)


def running_passes() -> list[Any]:
    """Return Keras's iterators of epochs of all running trainer methods, innermost first."""
    running = [frame for frame in _frames() if frame.f_code in _TRAINERS]
    iterators = [frame.f_locals.get("epoch_iterator") for frame in running]
    return [iterator for iterator in iterators if iterator is not None]


def is_called_by_program() -> bool:
    """Return whether the function that calls this is called by the main program or its modules.

    These are the modules in the program's folder; packages that are installed are not.
    """
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == "__main__":
        return True
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    folder, file = os.path.dirname(os.path.abspath(program or "")), frame.f_code.co_filename
    is_beside = bool(program) and os.path.abspath(file).startswith(folder + os.sep)
    return is_beside and "site-packages" not in file[len(folder) :]


def owners_around() -> Iterator[Any]:
    """Yield the local variable `self` of each function on the caller's stack, None without one."""
    for frame in _frames():
        yield frame.f_locals.get("self")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _callbacks_in(callback_list: Any) -> tuple[Any, ...]:
    return tuple(getattr(callback_list, "callbacks", ()))


def _refused(frame_locals: dict[str, Any]) -> str | None:
    if getattr(frame_locals.get("epoch_iterator"), "steps_per_epoch", None):
        return "steps_per_epoch"
    return "batch_size" if frame_locals.get("batch_size") is not None else None


def _adapter_of(frame: FrameType) -> Any:
    """Return the Keras adapter whose method runs in `frame`, or None.

    Only these frames' locals are read: reading them keeps what they hold alive.
    """
    if frame.f_code.co_name not in _ADAPTER_METHODS:
        return None
    owner = frame.f_locals.get("self")
    return owner if isinstance(getattr(owner, "py_dataset", None), keras.utils.PyDataset) else None
