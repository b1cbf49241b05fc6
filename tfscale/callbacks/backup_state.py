"""What a backup holds beside weights and optimizer: states of callbacks, and of random numbers.

One file for each `Place`, whose name it bears, so that the file that belongs to the weights is
known whatever was interrupted; see `backup_files`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.backup_files import STATES, Place
from tfscale.checkpoints.parts import write_aside
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.errors import ConfigError

State = dict[str, Any]


def resumable_callbacks() -> list[Any]:
    """Return the callbacks of the running `fit` that have a state of their own.

    These define `backup_state() -> dict` (JSON, and arrays in an optional list "arrays"),
    `restore_state(dict, epoch)`; `restore_state` is called on every rank before `on_train_begin`.
    Those that callbacks of tfscale contain (`companions`) count too.
    """
    every = [item for c in callbacks_of_fit() for item in (c, *getattr(c, "companions", ()))]
    return [c for c in every if hasattr(c, "backup_state")]


def write_state(folder: str, place: Place, states: list[State]) -> None:
    """Write the states that belong to a place of a run; a finished file or none."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    arrays = {
        f"{i}.{j}": array
        for i, state in enumerate(states)
        for j, array in enumerate(state.get("arrays", ()))
    }
    plain = [{k: v for k, v in state.items() if k != "arrays"} for state in states]
    text: Any = json.dumps(plain)
    write_aside(_path(folder, place), lambda file: np.savez(file, states=text, **arrays))


def read_state(folder: str, place: Place) -> list[State]:
    """Return what `write_state` was given.

    Raises:
        ConfigError: There is no such file, or it is damaged.
    """
    try:
        with np.load(_path(folder, place), allow_pickle=False) as content:
            states = json.loads(str(content["states"]))
            for name in content.files:
                if name != "states":
                    states[int(name.split(".")[0])].setdefault("arrays", []).append(content[name])
            return states
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(
            "A backup must hold the states of the callbacks it was written with. Received: "
            f"{_path(folder, place)}: {type(error).__name__}. Remove the folder to start afresh."
        ) from error


def remove_other_states(folder: str, keep: Collection[Place]) -> None:
    """Delete the files of all places but some."""
    kept = {_path(folder, place) for place in keep}
    for path in Path(folder).glob(f"{STATES}*"):
        if path not in kept:
            path.unlink(missing_ok=True)


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """Return the states of the layers' random numbers: uint32 (seed, numbers drawn) each.

    Keras does not save them with the weights.
    """
    return [g.state for layer in model._flatten_layers() for g in layer._seed_generators]


def restore_seeds(variables: list[keras.Variable], seeds: list[int], drawn: list[int]) -> None:
    """Go on with a seed of one's own, as many numbers in as the backup was."""
    for variable, seed, count in zip(variables, seeds, drawn, strict=False):
        variable.assign(np.array([seed, count], dtype=np.uint32))


def _path(folder: str, place: Place) -> Path:
    return Path(folder) / f"{STATES}{place.name}.npz"
