"""The states of the other callbacks in a checkpoint."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfscale import runtime
from tfscale.callbacks import backup_state
from tfscale.callbacks.checkpoint_state import group_of
from tfscale.checkpoints.reader import Reader
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.errors import ConfigError

# What Keras's callbacks count and compare with, set anew in their `on_train_begin`.
NUMBERS = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


def read_keras_callbacks() -> list[dict[str, Any]]:
    """Return the numbers of Keras's callbacks in the running `fit`, as JSON."""
    return [
        {name: _plain(getattr(callback, name, None)) for name in names}
        for callback, names in _keras_callbacks()
    ]


def restore_keras_callbacks(states: list[dict[str, Any]]) -> None:
    """Go on with what `read_keras_callbacks` returned, if these are the same callbacks.

    Args:
        states: In the order of the callbacks.
    """
    found = _keras_callbacks()
    if [set(state) for state in states] != [set(names) for _, names in found]:
        return
    for (callback, _), state in zip(found, states, strict=True):
        for name, value in state.items():
            if value is not None:
                setattr(callback, name, value)


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
    given = [type(callback).__name__ for callback in callbacks]
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
