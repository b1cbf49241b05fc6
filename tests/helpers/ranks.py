"""What the bodies of parallel tests share: modes of execution, and comparisons between ranks."""

from __future__ import annotations

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
    """Return copies of the values of variables."""
    return [np.array(v.numpy()) for v in variables]


def require_equal_ranks(variables: Any) -> None:
    """Require values that are equal bit by bit on all ranks."""
    every = tfscale.allgather_object(values_of(variables))
    for theirs in every:
        for first, other in zip(every[0], theirs, strict=True):
            np.testing.assert_array_equal(other, first)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Give all ranks one empty folder."""
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
    """Use a dtype policy for what is built meanwhile."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
