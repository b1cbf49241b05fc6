"""Traits that callbacks of tfscale declare, and the order of callbacks that follows from them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import keras


class Phase(enum.IntEnum):
    """The time at which a callback acts within each hook; docs/fit.md lists the acts."""

    GATHER = 0  # complete optimizer state, before any callback saves
    RESTORE = 1  # a checkpoint, or take one
    LEAD = 2  # callbacks of the script that begin its list
    SYNCHRONISE = 3  # the weights of one rank for all
    COMBINE = 4  # moving statistics, models of groups
    COMPARE = 5  # weights
    METRICS = 6  # of all ranks
    AVERAGE = 7  # parameters of ranks that train apart
    MEASURE = 8
    DECIDE = 9  # learning rate and batch size
    FOLLOW = 10  # callbacks of Keras, which decide and write, and others of the script
    STOP = 11  # together


class Traits(keras.callbacks.Callback):
    """Base class of tfscale's callbacks; Keras's own callbacks have none of these traits."""

    phase: Phase | None = None  # None: as a callback of the script
    compared: tuple[str, ...] = ()  # names of attributes that must be equal on all ranks
    averages_metrics = False  # puts metrics of all ranks into the logs
    sets_batch_size = False  # of the data
    shows_averages = False  # validates and saves the average of groups that train apart
    trains_apart = False  # ranks exchange no gradients, but average parameters
    # Callbacks that join the list with this one. The list is replaced, not changed.
    companions: list[Any] = []  # noqa: RUF012


# Callbacks of Keras that have a task of their own, and classes derived from them.
_TASKS = tuple(
    kind
    for name, kind in vars(keras.callbacks).items()
    if isinstance(kind, type) and name not in ("Callback", "CallbackList", "LambdaCallback")
)


def arrange(callbacks: Iterable[Any]) -> list[Any]:
    """Return callbacks in the order of their phases.

    The order of tfscale's own in the list does not matter: in a phase they are sorted by class.
    Callbacks of Keras and of the script keep their order. They follow tfscale's, but for those of
    the script that begin the list: numbers that these log are averaged over the ranks.
    """
    placed: list[tuple[tuple[Phase, str], Any]] = []
    leads = True
    for callback in callbacks:
        phase = callback.phase if isinstance(callback, Traits) else None
        has_task = isinstance(getattr(callback, "callback", callback), _TASKS)  # or in a RankZero
        leads = leads and not has_task and (phase is None or phase < Phase.LEAD)
        if phase is None:
            placed.append(((Phase.LEAD if leads else Phase.FOLLOW, ""), callback))
        else:
            placed.append(((phase, type(callback).__name__), callback))
    return [callback for _, callback in sorted(placed, key=lambda entry: entry[0])]


def own_of(callbacks: Iterable[Any]) -> list[Traits]:
    """Return the callbacks of tfscale in a list, order kept."""
    return [callback for callback in callbacks if isinstance(callback, Traits)]


def given_of(callbacks: Iterable[Any]) -> list[Traits]:
    """Return the callbacks of tfscale in a list that are no companions of others."""
    ours = own_of(callbacks)
    companions = [companion for callback in ours for companion in callback.companions]
    return [callback for callback in ours if callback not in companions]


def train_apart(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback lets ranks train apart, without exchanging gradients."""
    return any(callback.trains_apart for callback in own_of(callbacks))


def show_averages(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback shows the average of the models."""
    return any(callback.shows_averages for callback in own_of(callbacks))


def decider_without_averages(callbacks: Iterable[Any]) -> str | None:
    """Return the name of the first callback that decides by metrics of this rank alone, if any."""
    if any(callback.averages_metrics for callback in own_of(callbacks)):
        return None
    kinds = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
    deciders = (type(c).__name__ for c in callbacks if isinstance(c, kinds))
    return next(deciders, None)
