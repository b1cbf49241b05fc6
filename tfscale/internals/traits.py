"""What callbacks of tfscale say of themselves, to each other and to what looks at a `fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras


class Traits(keras.callbacks.Callback):
    """A callback of tfscale. Keras's own have none of these traits.

    Attributes:
        compared: Names of attributes that must be equal on all ranks when training begins.
        averages_metrics: Callbacks after this one see metrics of all ranks.
        sets_batch_size: It sets the batch size of the data.
        shows_averages: It shows the average of groups that train apart.
        trains_apart: Ranks exchange no gradients, but average parameters.
        companions: Callbacks inside of this one, which get its hooks.
    """

    compared: tuple[str, ...] = ()
    averages_metrics = False
    sets_batch_size = False
    shows_averages = False
    trains_apart = False
    companions: list[Any] = []  # noqa: RUF012  # replaced, never changed


def own_of(callbacks: Iterable[Any]) -> list[Traits]:
    """Return those callbacks that are tfscale's, in their order."""
    return [callback for callback in callbacks if isinstance(callback, Traits)]


def train_apart(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback wants ranks that exchange no gradients."""
    return any(callback.trains_apart for callback in own_of(callbacks))


def show_averages(callbacks: Iterable[Any]) -> bool:
    """Return whether some callback, or one inside of it, shows the average of the models."""
    own = own_of(callbacks)
    return any(c.shows_averages or show_averages(c.companions) for c in own)


def judge_before_averages(callbacks: Iterable[Any]) -> str | None:
    """Return the name of the first callback that judges by metrics of this rank alone, if any."""
    judges = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
    for callback in callbacks:
        if isinstance(callback, Traits) and callback.averages_metrics:
            return None
        if isinstance(callback, judges):
            return type(callback).__name__
    return None
