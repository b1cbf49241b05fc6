"""Who is reading the data: a training epoch of `fit`, an evaluation, or user code.

Keras tells a PyDataset that a pass begins, but not what for. An evaluation must not
move the order of the training epochs, an epoch number given by `initial_epoch` must
be kept, and both must come out the same on all ranks whatever runs in between. The
call stack is the one place where this is known exactly, so it is read here, once
per pass, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
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
class KerasPass:
    """What the call stack says about the pass that begins or ends.

    Attributes:
        adapter: Keras's adapter between the data and its loop; None if user code called.
        caller: "fit", "evaluate", "predict": the innermost that runs; None without one.
        is_inside_fit: A `fit` runs, perhaps around an evaluation.
        epoch: Keras's number of the epoch; None unless `fit` is in its epoch loop.
        refused: Name of an argument of `fit` that contradicts the data; None if there is none.
    """

    adapter: Any = None
    caller: str | None = None
    is_inside_fit: bool = False
    epoch: int | None = None
    refused: str | None = None

    def keep_order(self) -> None:
        """Stop Keras from shuffling the steps: it would do so differently on each rank.

        Keras 3.5 decides when it builds its pipeline, later versions in each pass: this
        is called at the earliest and at the last moment, when Keras asks for the number
        of batches and when a pass begins.
        """
        if self.adapter is not None:
            self.adapter.shuffle = False

    def require_whole_epochs(self) -> None:
        """Raise where an argument of `fit` contradicts the data.

        Raises:
            ConfigError: It cuts batches or epochs of its own.
        """
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
    """Read off the call stack what is going on around the caller.

    Returns:
        The innermost adapter and trainer method that are running.
    """
    adapter: Any = None
    caller: str | None = None
    epoch: int | None = None
    refused: str | None = None
    is_inside_fit = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _TRAINERS.get(frame.f_code)
        is_inside_fit |= name == "fit"
        if adapter is None and caller is None:
            adapter = _adapter_of(frame)
        if caller is None and name is not None:
            caller = name
            if name == "fit":
                epoch, refused = frame.f_locals.get("epoch"), _refused(frame)
        frame = frame.f_back
    return KerasPass(adapter, caller, is_inside_fit, epoch, refused)


def running_passes() -> list[Any]:
    """Return what serves the batches of each running `fit`, `evaluate` and `predict`.

    Returns:
        Keras's iterators of epochs, the innermost first; each belongs to one call.
    """
    iterators = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _TRAINERS and "epoch_iterator" in frame.f_locals:
            iterators.append(frame.f_locals["epoch_iterator"])
        frame = frame.f_back
    return iterators


def data_of_fit() -> Any:
    """Return the `x` that the innermost running `fit` was given, or None outside of one."""
    return _local_of_fit("x")


def epochs_of_fit() -> Any:
    """Return what serves the epochs of the innermost running `fit`, or None outside of one."""
    return _local_of_fit("epoch_iterator")


def argument_of_fit(name: str) -> Any:
    """Return an argument that the innermost running `fit` was given, or None outside of one."""
    return _local_of_fit(name)


def callbacks_of_fit() -> list[keras.callbacks.Callback]:
    """Return the callbacks of the innermost running `fit`; none outside of one."""
    return list(getattr(_local_of_fit("callbacks"), "callbacks", ()))


def callbacks_of_evaluate() -> list[keras.callbacks.Callback]:
    """Return the callbacks of the innermost running `evaluate`; none outside of one."""
    return list(getattr(_local_of("evaluate", "callbacks"), "callbacks", ()))


def put_first(callback: keras.callbacks.Callback) -> None:
    """Put a callback in front of those of the innermost running `fit`.

    Its hooks of batches run on the main thread, where Keras would otherwise use others if all
    callbacks let it.

    Args:
        callback: Gets the hooks that come after the present one.
    """
    callback_list = _local_of_fit("callbacks")
    # A new list: the present one is being walked through.
    callback_list.callbacks = [callback, *callback_list.callbacks]
    callback_list._async_train = False


def put_last(callback: keras.callbacks.Callback) -> None:
    """Put a callback behind those of the innermost running `fit`; see `put_first`."""
    callback_list = _local_of_fit("callbacks")
    callback_list.callbacks = [*callback_list.callbacks, callback]
    callback_list._async_train = False


def _local_of_fit(name: str) -> Any:
    return _local_of("fit", name)


def _local_of(caller: str, name: str) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _TRAINERS.get(frame.f_code) == caller:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None


def _refused(frame: FrameType) -> str | None:
    if getattr(frame.f_locals.get("epoch_iterator"), "steps_per_epoch", None):
        return "steps_per_epoch"
    return "batch_size" if frame.f_locals.get("batch_size") is not None else None


def _adapter_of(frame: FrameType) -> Any:
    """Return the Keras adapter whose method runs in `frame`, or None.

    Only these frames' locals are read: reading them keeps what they hold alive.
    """
    if frame.f_code.co_name not in _ADAPTER_METHODS:
        return None
    owner = frame.f_locals.get("self")
    return owner if isinstance(getattr(owner, "py_dataset", None), keras.utils.PyDataset) else None
