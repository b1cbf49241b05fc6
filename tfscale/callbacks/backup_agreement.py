"""What ranks tell each other when a backup is looked for: one of them reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfscale import objects, runtime
from tfscale.callbacks import building
from tfscale.errors import ConfigError


def begin_together(model: keras.Model, seeds: list[int], has_backup: bool) -> list[list[int]]:
    """Return the seeds of all ranks; build optimizers where a backup will be read. Collective.

    Args:
        model: What is trained.
        seeds: Of this rank.
        has_backup: Whether there is one; as rank 0 sees it.

    Raises:
        ConfigError: Some rank's model is not built; on all ranks.
    """
    every = objects.allgather_object((seeds, bool(model.built), has_backup), "seeds")
    unbuilt = [rank for rank, (_, is_built, _) in enumerate(every) if not is_built]
    if unbuilt:
        raise ConfigError(
            "A model must be built before its backup is read. Received: "
            f"model={model.name!r}, not built on ranks {unbuilt}. Call it on one batch before fit, "
            "or use tfscale.prepare(model, sample_batch=...)."
        )
    if every[0][2] and not runtime.is_single():
        building.build_optimizer(model)
    return [own for own, _, _ in every]


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
