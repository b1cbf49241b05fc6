"""Traits that callbacks of tfscale declare for each other and for the checks of a `fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras


class Traits(keras.callbacks.Callback):
    """Base class of tfscale's callbacks; Keras's own callbacks have none of these traits."""

    compared: tuple[str, ...] = ()  # names of attributes that must be equal on all ranks
    averages_metrics = False  # callbacks after this one see metrics of all ranks
    sets_batch_size = False  # of the data
    shows_averages = False  # validates and saves the average of groups that train apart
    trains_apart = False  # ranks exchange no gradients, but average parameters
    # Callbacks inside this one, whose states checkpoints keep. The list is replaced, not changed.
    companions: list[Any] = []  # noqa: RUF012


def own_of(callbacks: Iterable[Any]) -> list[Traits]:
    """Return the callbacks of tfscale in a list, order kept."""
    return [callback for callback in callbacks if isinstance(callback, Traits)]


def train_apart(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback lets ranks train apart, without exchanging gradients."""
    return any(callback.trains_apart for callback in own_of(callbacks))


def show_averages(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback, or a companion of one, shows the average of the models."""
    own = own_of(callbacks)
    return any(c.shows_averages or show_averages(c.companions) for c in own)


def decider_before_averages(callbacks: Iterable[Any]) -> str | None:
    """Return the name of the first callback that decides by metrics of this rank alone, if any."""
    deciders = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
    for callback in callbacks:
        if isinstance(callback, Traits) and callback.averages_metrics:
            return None
        if isinstance(callback, deciders):
            return type(callback).__name__
    return None
