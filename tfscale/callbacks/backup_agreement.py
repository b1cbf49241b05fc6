"""What ranks tell each other when a backup is looked for: one of them reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfscale.callbacks import building, model_state
from tfscale.callbacks.backup_state import begun_before
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.data.keras_pass import callbacks_of_fit
from tfscale.internals.optimizers import optimizers_of


def require_order(backup: Any, has_groups: bool) -> None:
    """Require that callbacks with a state stand behind the one that restores it. Collective.

    Args:
        backup: The callback that restores.
        has_groups: Whether groups train apart.

    Raises:
        ConfigError: Some begin training before, on some rank; on all ranks.
    """
    callbacks = callbacks_of_fit()
    before = callbacks[: callbacks.index(backup)] if backup in callbacks else []
    every = objects.allgather_object(begun_before(before, has_groups), name="order of callbacks")
    early: list[str] = next(filter(None, every), [])
    if early:
        raise ConfigError(
            "States of callbacks are restored before these begin training. Received: "
            f"{', '.join(early)} in front of BackupAndRestore. Put BackupAndRestore first."
        )


def begin_together(model: keras.Model, seeds: list[int], has_backup: bool) -> list[list[int]]:
    """Return the seeds of all ranks; build optimizers where a backup will be read. Collective.

    Args:
        model: What is trained.
        seeds: Of this rank.
        has_backup: Whether there is one; as rank 0 sees it.

    Raises:
        ConfigError: Some rank's model is not built, or has local layers; there is a backup, and
            optimizers beside the compiled one are not built; on all ranks.
    """
    # Not `building.is_built`: Keras saves no weights of a model that is not marked as built.
    later = [o.name for o in optimizers_of(model) if o is not model.optimizer and not o.built]
    own = (seeds, bool(model.built), has_backup, bool(model_state.local_ids(model)), later)
    every = objects.allgather_object(own, "seeds")
    unbuilt = [rank for rank, (_, is_built, *_) in enumerate(every) if not is_built]
    if unbuilt:
        raise ConfigError(
            "A model must be built before its backup is read. Received: "
            f"model={model.name!r}, not built on ranks {unbuilt}. {building.how_to_build(model)}"
        )
    _require_built_optimizers(model, [names for *_, names in every if names and every[0][2]])
    if any(has_local for _, _, _, has_local, _ in every) and not runtime.is_single():
        raise ConfigError(
            "One rank writes the backup, which would lose the local layers of the others. "
            f"Received: model={model.name!r} with local layers or variables. Use "
            "tfscale.callbacks.Checkpoint, to which each rank writes its own."
        )
    if every[0][2] and not runtime.is_single():
        building.build_optimizer(model)
    return [seeds for seeds, *_ in every]


def _require_built_optimizers(model: keras.Model, names: list[list[str]]) -> None:
    if names:
        raise ConfigError(
            "The state of an optimizer can be read once its variables exist. Received: a backup, "
            f"and optimizers {names[0]} of model={model.name!r} that are not built. Before fit "
            "call build(variables that it trains) of each."
        )


def read_together(read: Callable[[], Any], folder: str) -> Any:
    """Return on all ranks what rank 0 reads. Collective.

    Args:
        read: Called on rank 0; the result can be pickled.
        folder: Of the backup, for messages.

    Raises:
        ConfigError: It failed; on all ranks.
    """
    found: Any = None
    cause = None
    if runtime.rank() == 0:
        try:
            found = read()
        except Exception as error:  # whatever it is, the other ranks wait
            cause = error
            found = error if isinstance(error, ConfigError) else _unreadable(error, folder)
    found = objects.broadcast_object(found, 0, name="backup")
    if isinstance(found, ConfigError):
        raise found from (None if found is cause else cause)
    return found


def _unreadable(error: Exception, folder: str) -> ConfigError:
    return ConfigError(
        f"A backup must be readable, and of this model. Received: {folder} and "
        f"{type(error).__name__}: {error}. Mend this, or remove the folder to start afresh."
    )
