"""What a backup holds beside weights and optimizer: of callbacks, random numbers and data.

One file for each `Place`, whose name it bears, so that the file that belongs to the weights is
known whatever was interrupted; see `backup_files`.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.backup_files import STATES, Place
from tfscale.checkpoints.parts import write_aside
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import callbacks_of_fit, data_of_fit
from tfscale.optimizer.model_optimizers import accumulating

logger = logging.getLogger("tfscale")

State = dict[str, Any]


def resumable_callbacks() -> list[Any]:
    """Return the callbacks of the running `fit` that have a state of their own.

    These define `backup_state() -> dict` (JSON, and arrays in an optional list "arrays"),
    `restore_state(dict, epoch)`; `restore_state` is called on every rank before `on_train_begin`.
    Those that callbacks of tfscale contain (`companions`) count too; one inside of `RankZero` has
    its state on rank 0.
    """
    return _resumable_in(callbacks_of_fit())


def begun_before(callbacks: Sequence[Any], has_groups: bool = True) -> list[str]:
    """Return the names of callbacks that begin training without the state they had.

    Args:
        callbacks: In the list before the one that restores: their `on_train_begin` has been called.
        has_groups: Groups train apart. Only then does what `BroadcastGlobalVariablesCallback`
            contains have a state.
    """
    plain = keras.callbacks.Callback.on_train_begin
    return [
        kind_of(callback)
        for callback in _resumable_in(callbacks, has_groups)
        if getattr(type(_inner(callback)), "on_train_begin", plain) is not plain
    ]


def kind_of(callback: Any) -> str:
    """Return what a callback of `resumable_callbacks` is called in messages and checkpoints."""
    name = type(_inner(callback)).__name__
    return f"RankZero({name})" if isinstance(callback, _OnRankZero) else name


class _OnRankZero:
    """The state of a callback inside of `RankZero`: on other ranks it learns of nothing."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def backup_state(self) -> State:
        return dict(self.callback.backup_state()) if runtime.rank() == 0 else {}

    def restore_state(self, state: State, epoch: int) -> None:
        if runtime.rank() == 0:
            self.callback.restore_state(state, epoch)


def _resumable_in(callbacks: Sequence[Any], has_companions: bool = True) -> list[Any]:
    from tfscale.callbacks.rank_zero import RankZero  # which imports this module

    every: list[Any] = []
    for callback in callbacks:
        is_inside = isinstance(callback, RankZero)
        every.append(_OnRankZero(callback.callback) if is_inside else callback)
        every += getattr(callback, "companions", ()) if has_companions else ()
    return [callback for callback in every if hasattr(_inner(callback), "backup_state")]


def _inner(callback: Any) -> Any:
    return callback.callback if isinstance(callback, _OnRankZero) else callback


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


def begin_cycles(model: keras.Model, n_lost: Sequence[int]) -> None:
    """Begin cycles of `backward_passes_per_step` where a run goes on.

    Args:
        model: With the weights of the backup.
        n_lost: Batches of a cycle that had begun when it was written, per optimizer with cycles.
    """
    for optimizer, n in zip(accumulating(model), n_lost, strict=False):
        optimizer.begin_cycle(n)
    if any(n_lost) and runtime.rank() == 0:
        logger.warning(
            "A backup keeps no gradients that wait for their exchange: %d batch(es) of "
            "backward_passes_per_step are lost. Let an epoch have a multiple of it, or use "
            "tfscale.callbacks.Checkpoint, which keeps them.",
            max(n_lost),
        )


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


def data_state() -> dict[str, int] | None:
    """Return the state of the `GlobalBatches` that the running `fit` trains on; else None."""
    data = data_of_fit()
    return data.state() if isinstance(data, GlobalBatches) else None


def restore_order(state: dict[str, int] | None) -> None:
    """Let the data of the running `fit` go on with the order of samples that it had.

    The batch size is for callbacks to set. Other data than before keeps its own order.

    Args:
        state: What `data_state` returned; None in backups that do not tell.
    """
    data = data_of_fit()
    if state is None or not isinstance(data, GlobalBatches):
        return
    if state["samples"] == data.samples:
        data.restore({**state, "batch_size": data.batch_size})
    elif runtime.rank() == 0:
        logger.warning(
            "The run goes on with other data than before: %d samples, and %d in the backup. Their "
            "order begins anew.",
            data.samples,
            state["samples"],
        )


def _path(folder: str, place: Place) -> Path:
    return Path(folder) / f"{STATES}{place.name}.npz"
