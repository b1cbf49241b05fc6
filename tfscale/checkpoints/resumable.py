"""The states of callbacks: the protocol `Resumable`, and counters of Keras's own callbacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np

from tfscale.checkpoints.files import Part
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.exchange.states import Saved, Scope
from tfscale.internals.traits import Traits

logger = logging.getLogger("tfscale")

State = dict[str, Any]


@runtime_checkable
class Resumable(Protocol):
    """A callback whose state is saved in checkpoints.

    Arrays of the state must be equal on ranks whose models are equal.
    """

    def backup_state(self) -> State:
        """Return the state: JSON, and arrays in an optional list "arrays"."""

    def restore_state(self, state: State, epoch: int) -> None:
        """Restore a `backup_state`, before `on_train_begin`; training resumes with `epoch`."""


@runtime_checkable
class Mergeable(Resumable, Protocol):
    """A `Resumable` whose state differs between ranks; of other callbacks rank 0's counts."""

    def merge_states(self, states: Sequence[State]) -> State:
        """Return the state for another number of ranks, given all ranks' states without arrays."""


class OnRankZero:
    """A `Resumable` with a state on rank 0 only: other ranks do not call it."""

    def __init__(self, callback: Resumable) -> None:
        self.callback = callback

    def backup_state(self) -> State:
        """Return the state on rank 0, an empty one elsewhere."""
        return dict(self.callback.backup_state()) if runtime.rank() == 0 else {}

    def restore_state(self, state: State, epoch: int) -> None:
        """Restore the state on rank 0."""
        if runtime.rank() == 0:
            self.callback.restore_state(state, epoch)


def resumables(callbacks: Sequence[Any]) -> list[Resumable]:
    """Return the callbacks of a list that have a state, including those in a RankZero."""
    resumed: list[Resumable] = []
    for callback in callbacks:
        inner = getattr(callback, "callback", None) if isinstance(callback, Traits) else None
        if isinstance(inner, Resumable):
            resumed.append(OnRankZero(inner))
        elif isinstance(callback, Resumable):
            resumed.append(callback)
    return resumed


def kind_of(callback: Resumable) -> str:
    """Return the name of a callback's class for messages and checkpoints."""
    if isinstance(callback, OnRankZero):
        return f"RankZero({kind_of(callback.callback)})"
    return type(callback).__name__


class CallbackState:
    """The state of a `Resumable`, as checkpoints save it; `restore_callbacks` restores them."""

    def __init__(self, callback: Resumable) -> None:
        self._callback = callback

    def saved(self, scope: Scope) -> Saved:
        """Copy the state."""
        state = dict(self._callback.backup_state())
        numbered = enumerate(state.pop("arrays", []))
        arrays = {f"callback/{i}": np.array(array) for i, array in numbered if scope.is_leader}
        return Saved(arrays, {"callbacks": {"kind": kind_of(self._callback), "state": state}})


def restore_callbacks(callbacks: Sequence[Any], parts: Sequence[Part], leader: int) -> None:
    """Restore the states of callbacks, and the arrays that the `leader` of this group wrote."""
    resumed = resumables(callbacks)
    written = [state["kind"] for state in parts[0].info["callbacks"]]
    kinds = [kind_of(callback) for callback in resumed]
    if sorted(kinds) != sorted(written):
        raise ConfigError(
            f"callbacks must be those of the checkpoint. Received: {kinds}; the checkpoint has "
            f"the states of {written}. Pass the same callbacks, or another directory."
        )
    is_same_size, epoch = len(parts) == runtime.size(), parts[0].info["position"]["epoch"]
    for kind, callback in zip(kinds, resumed, strict=True):
        j = written.index(kind)
        written[j] = ""  # the k-th callback of a kind gets the k-th state of this kind
        states = [part.info["callbacks"][j]["state"] for part in parts]
        if is_same_size:
            state = states[runtime.rank()]
        else:
            state = callback.merge_states(states) if isinstance(callback, Mergeable) else states[0]
        arrays = Saved(parts[leader].arrays).series(f"callback{j}")
        callback.restore_state({**state, "arrays": arrays} if arrays else dict(state), epoch)


_SWAPPED = "_ema_weights_in_model"

# Attributes of Keras's callbacks that on_train_begin resets to initial values.
_COUNTERS = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
    # Weights and averages may be swapped when a checkpoint is taken, as they are for validation.
    keras.callbacks.SwapEMAWeights: (_SWAPPED,),
}


def read_counters(callbacks: Sequence[Any], is_end: bool = False) -> list[State]:
    """Return class and counters of Keras's callbacks in a list, as JSON."""
    states = []
    for callback, names in _counting(callbacks):
        numbers = {name: _plain(getattr(callback, name, None)) for name in names}
        if is_end and _SWAPPED in numbers:  # the optimizer has assigned the averages to the weights
            numbers[_SWAPPED] = 0
        states.append({"kind": type(callback).__name__, "numbers": numbers})
    return states


class BestWeights:
    """The best weights that Keras's `EarlyStopping` keeps, as checkpoints save them."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks

    def saved(self, scope: Scope) -> Saved:
        """Copy them, with the numbers of their callbacks in `read_counters`."""
        arrays: dict[str, np.ndarray] = {}
        for number, (callback, _) in enumerate(
            _counting(self._callbacks) if scope.is_leader else ()
        ):
            weights = enumerate(getattr(callback, "best_weights", None) or ())
            arrays |= {f"best{number}/{i}": np.array(array) for i, array in weights}
        return Saved(arrays)


def read_best_weights(
    parts: Sequence[Part], source: int, leader: int
) -> Mapping[int, list[np.ndarray]]:
    """Return the best weights of Keras's callbacks on a rank, by their numbers in its counters.

    The `leader` of its group wrote them. If it counted otherwise, from metrics of its own samples,
    they are those of another epoch, and left out.
    """
    counters, of_leader = (parts[rank].info["keras_callbacks"] for rank in (source, leader))
    written = Saved(parts[leader].arrays)
    pairs = enumerate(zip(counters, of_leader, strict=False))
    return {number: written.series(f"best{number}") for number, (own, led) in pairs if own == led}


def restore_counters(
    callbacks: Sequence[Any],
    states: Sequence[State],
    is_own: bool,
    best_weights: Mapping[int, list[np.ndarray]] | None = None,
) -> None:
    """Restore the counters of the k-th callback of each class from the k-th state of that class.

    Ranks may have different callbacks, so each warns of its own callbacks without a state. With
    `is_own` the states are this rank's, and states without a callback are warned of, too; those of
    another rank may belong to callbacks that this one never had. `best_weights` are those of
    `read_best_weights`.
    """
    left = dict(enumerate(states))
    for callback, _ in _counting(callbacks):
        kind = type(callback).__name__
        number = next((number for number, state in left.items() if state["kind"] == kind), None)
        if number is None:
            text = "%s on rank %d counts from 0: its numbers were not saved."
            logger.warning(text, kind, runtime.rank())
            continue
        numbers = left.pop(number)["numbers"]
        if getattr(callback, "restore_best_weights", False) and numbers.get("best") is not None:
            if weights := (best_weights or {}).get(number):
                numbers = {**numbers, "best_weights": weights}
            else:
                # Else the next epoch's weights would be kept as the best, without beating `best`.
                text = "%s on rank %d seeks the best epoch again: its best weights were not saved."
                logger.warning(text, kind, runtime.rank())
                numbers = {name: numbers[name] for name in numbers.keys() - {"best", "best_epoch"}}
        for name, value in numbers.items():
            if value is not None:
                setattr(callback, name, value)
    for state in left.values() if is_own else ():
        text = "The numbers of %s on rank %d are not used: fit has no such callback."
        logger.warning(text, state["kind"], runtime.rank())


def _counting(callbacks: Sequence[Any]) -> list[tuple[Any, tuple[str, ...]]]:
    inner = [getattr(c, "callback", c) for c in callbacks]  # of RankZero
    return [(c, names) for c in inner for kind, names in _COUNTERS.items() if isinstance(c, kind)]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int) else float(value)
