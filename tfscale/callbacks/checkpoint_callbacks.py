"""The states of the other callbacks in a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfscale.callbacks import backup_state
from tfscale.callbacks.checkpoint_state import group_of
from tfscale.checkpoints.reader import Reader
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.internals.stack import callbacks_of_fit

logger = logging.getLogger("tfscale")

_SWAPPED = "_ema_weights_in_model"

# What Keras's callbacks count and compare with, set anew in their `on_train_begin`.
NUMBERS = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
    # Where a backup is written weights and averages may be exchanged, as validation wants them.
    keras.callbacks.SwapEMAWeights: (_SWAPPED,),
}


def read_keras_callbacks(is_end: bool = False) -> list[dict[str, Any]]:
    """Return class and numbers of Keras's callbacks in the running `fit`, as JSON.

    Args:
        is_end: Training ends, and the optimizer has made weights of averages: none are exchanged.
    """
    return [
        {
            "kind": type(callback).__name__,
            "numbers": {
                name: _plain(getattr(callback, name, None))
                if not (is_end and name == _SWAPPED)
                else 0
                for name in names
            },
        }
        for callback, names in _keras_callbacks()
    ]


def restore_keras_callbacks(reader: Reader) -> None:
    """Go on with this rank's numbers, or with those of rank 0 at another number of ranks."""
    is_same_size = reader.size == runtime.size()
    source = runtime.rank() if is_same_size else 0
    set_numbers(reader.infos[source]["keras_callbacks"], is_own=source == runtime.rank())


def set_numbers(states: Sequence[dict[str, Any]], is_own: bool) -> None:
    """Let the k-th callback of each class go on with the numbers of the k-th of that class.

    What finds no partner is warned of: ranks may have different callbacks, so each looks itself.

    Args:
        states: What `read_keras_callbacks` returned.
        is_own: On this rank. Another one may have had callbacks that this one never had.
    """
    left = list(states)
    for callback, _ in _keras_callbacks():
        kind = type(callback).__name__
        state = next((state for state in left if state.get("kind") == kind), None)
        if state is None:
            text = "%s on rank %d counts anew: its numbers are not among those that were saved."
            logger.warning(text, kind, runtime.rank())
            continue
        left.remove(state)
        numbers = state["numbers"]
        if getattr(callback, "restore_best_weights", False) and numbers.get("best") is not None:
            # Otherwise the next epoch's weights would stand for the best ones, unbeaten.
            text = "%s on rank %d seeks the best epoch anew: best weights are not saved."
            logger.warning(text, kind, runtime.rank())
            numbers = {name: numbers[name] for name in numbers.keys() - {"best", "best_epoch"}}
        for name, value in numbers.items():
            if value is not None:
                setattr(callback, name, value)
    for state in left if is_own else ():
        logger.warning(
            "Nobody goes on with what %s on rank %d had counted: fit has no such callback.",
            state.get("kind", "a callback of unknown class"),
            runtime.rank(),
        )


def _keras_callbacks() -> list[tuple[Any, tuple[str, ...]]]:
    callbacks = [getattr(c, "callback", c) for c in callbacks_of_fit()]
    return [
        (callback, names)
        for callback in callbacks
        for kind, names in NUMBERS.items()
        if isinstance(callback, kind)
    ]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int) else float(value)


def restore_callbacks(reader: Reader) -> None:
    """Give the callbacks of the running `fit` their states, before their `on_train_begin`.

    Raises:
        ConfigError: They are not those of before.
    """
    callbacks = backup_state.resumable_callbacks()
    written = [state["kind"] for state in reader.infos[0]["callbacks"]]
    given = [backup_state.kind_of(callback) for callback in callbacks]
    if given != written:
        raise ConfigError(
            f"A run goes on with the callbacks it began with. Received: {given}; the checkpoint "
            f"has the states of {written}. Pass the same callbacks, or another directory."
        )
    rank, epoch = runtime.rank(), reader.infos[0]["position"]["epoch"]
    is_same_size = reader.size == runtime.size()
    source = rank if is_same_size else 0
    leader = group_of(source, reader.groups)[0]
    for j, callback in enumerate(callbacks):
        states = [info["callbacks"][j]["state"] for info in reader.infos]
        merge = getattr(callback, "merge_states", lambda states: states[0])
        state = dict(states[rank] if is_same_size else merge(states))
        arrays: list[np.ndarray] = []
        while reader.has(leader, f"callback{j}/{len(arrays)}"):
            arrays.append(reader.get(leader, f"callback{j}/{len(arrays)}"))
        callback.restore_state({**state, "arrays": arrays} if arrays else state, epoch)
