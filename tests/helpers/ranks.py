"""What the bodies of parallel tests share: modes of execution, and comparisons between ranks."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale


def in_both_modes(body: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield what a body returns: eager, traced, and from a second step of the traced one."""
    yield body(*arguments)
    traced = tf.function(body)
    yield traced(*arguments)
    yield traced(*arguments)


def outcome(action: Callable[[], Any]) -> str:
    """Return "Type: text" of what an action raises, or "no error"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def require_error(action: Callable[[], Any], *texts: str) -> None:
    """Require that every rank gets an error that holds all the texts."""
    messages = tfscale.allgather_object(outcome(action))
    for text in texts:
        assert all(text in message for message in messages), (text, messages)


def values_of(variables: Any) -> list[np.ndarray]:
    return [np.array(v.numpy()) for v in variables]


class StopAt(keras.callbacks.Callback):
    """Stop training on one rank, by default the last: after a batch; None is an epoch's end."""

    def __init__(self, batch: int | None = None, epoch: int = 1, rank: int = -1) -> None:
        super().__init__()
        self._place, self._rank = (epoch, batch), rank % tfscale.size()
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self._stop(batch)

    def on_epoch_end(self, epoch, logs=None):
        self._stop(None)

    def _stop(self, batch: int | None) -> None:
        if tfscale.rank() == self._rank and (self.epochs[-1], batch) == self._place:
            self.model.stop_training = True


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    made = tempfile.mkdtemp() if tfscale.rank() == 0 else None
    path = Path(tfscale.broadcast_object(made, root_rank=0))
    try:
        yield path
        tfscale.barrier()
    finally:
        if tfscale.rank() == 0:
            shutil.rmtree(path)


@contextlib.contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    with dtype_policy("float64"):  # asked for first: the default one would follow floatx
        keras.config.set_floatx("float64")
        try:
            yield
        finally:
            keras.config.set_floatx("float32")


class Interruption(Exception):
    pass


class InterruptAt(keras.callbacks.Callback):
    """Interrupt a `fit` after a batch of an epoch, or, where it is None, at the epoch's end."""

    def __init__(self, epoch: int, batch: int | None = None) -> None:
        super().__init__()
        self._place, self._epoch = (epoch, batch), -1

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._place:
            raise Interruption

    def on_epoch_end(self, epoch, logs=None):
        self.on_train_batch_end(None)


def new_folder() -> Path:
    """Return a folder of rank 0, on all ranks, which stays."""
    folder = tempfile.mkdtemp(prefix="tfscale-trace-") if tfscale.rank() == 0 else None
    return Path(tfscale.broadcast_object(folder))
