"""What a backup holds of groups whose models differ, sent to the rank that writes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.backup_files import Place
from tfscale.callbacks.checkpoint_state import Position, Snapshot
from tfscale.checkpoints.parts import (
    Arrays,
    DamagedError,
    Part,
    UnreadableError,
    read_manifest,
    write_part,
)
from tfscale.checkpoints.reader import Reader
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.fit.unsynchronised import trains_apart


def has_groups(model: keras.Model) -> bool:
    """Return whether a model is trained by groups or single ranks, or will be later on."""
    strategy = getattr(getattr(model, "optimizer", None), "strategy", None)
    return (isinstance(strategy, LocalSGD) or trains_apart()) and not runtime.is_single()


def write_groups(model: keras.Model, folder: str, place: Place) -> None:
    """Write on rank 0 what each rank holds between two steps. Collective.

    Args:
        model: With the groups' own parameters in it.
        folder: Of the backup; used on rank 0.
        place: Of the run, as rank 0 sees it.

    Raises:
        ExchangeError: Communication failed.
    """
    own = Snapshot(model, Position(epoch=place.epoch), run="backup").take()
    path = _path(folder, place)
    # Aside: an earlier run may have been here, and parts of two of them must not mix.
    new = path.with_name(f"{path.name}.unfinished")
    if runtime.rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
    for rank in range(runtime.size()):  # one after another: rank 0 never holds two
        is_own = rank == runtime.rank()
        part = objects.broadcast_object(own if is_own else None, rank, name="part of a backup")
        if runtime.rank() == 0:
            write_part(new, rank, part)
    if runtime.rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        new.replace(path)


@contextlib.contextmanager
def averaged(model: keras.Model) -> Iterator[None]:
    """Show the average of the groups' models within a block, for rank 0 to save. Collective."""
    optimizer = model.optimizer
    if getattr(optimizer, "kept_state", None):
        optimizer.full_state()  # the first rank keeps it
    has_average = getattr(optimizer, "group_average", None) is not None
    own = optimizer.show_average() if has_average else None
    yield
    if own is not None:
        optimizer.set_own(own)


def remove_other_groups(folder: str, keep: Collection[Place]) -> None:
    """Delete what was written for all places but some."""
    kept = {_path(folder, place) for place in keep}
    for path in Path(folder).glob("groups-*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def read_groups(folder: str, place: Place) -> Reader | None:
    """Return on all ranks what `write_groups` wrote, or None where there is nothing. Collective.

    Args:
        folder: Of the backup; used on rank 0.
        place: See `write_groups`.

    Raises:
        ConfigError: A file is damaged; on all ranks.
        ExchangeError: Communication failed.
    """
    size: Any = 0
    path = _path(folder, place)
    if runtime.rank() == 0 and path.exists():
        first = _read(path, 0)
        size = first.info["size"] if isinstance(first, Part) else first
    size = objects.broadcast_object(size, 0, name="parts of a backup")
    if isinstance(size, ConfigError):
        raise size
    parts = []
    for rank in range(size):
        part: Any = _read(path, rank) if runtime.rank() == 0 else None
        part = objects.broadcast_object(part, 0, name="part of a backup")
        if isinstance(part, ConfigError):
            raise part
        parts.append(part)
    return Received(parts) if parts else None


class Received(Reader):
    """Parts of a backup in memory."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Keep them, in rank order."""
        super().__init__(Path(), [{"info": part.info} for part in parts])
        self._parts = [_Arrays(part.arrays) for part in parts]

    def _arrays(self, rank: int) -> Any:
        return self._parts[rank]


class _Arrays(dict[str, np.ndarray]):
    @property
    def names(self) -> frozenset[str]:
        return frozenset(self)


def _read(path: Path, rank: int) -> Part | ConfigError:
    try:
        manifest = read_manifest(path, rank)
        arrays = Arrays(path, manifest)
        part = Part(manifest["info"], {name: arrays[name] for name in arrays.names})
        arrays.close()
        return part
    except UnreadableError as error:
        return ConfigError(
            f"All ranks must be able to read a backup. Received: {path}: {error}. It may be sound: "
            "mend this, then start again."
        )
    except DamagedError as error:
        return ConfigError(
            f"A backup must hold the models of all groups. Received: {path}: {error}. Remove the "
            "folder to start afresh."
        )


def _path(folder: str, place: Place) -> Path:
    return Path(folder) / f"groups-{place.name}"
