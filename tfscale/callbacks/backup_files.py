"""The files of a backup, and which of them belong together, whatever was interrupted.

States of callbacks are written first, under a name with the number of updates that the weights will
have; then the weights, beside and renamed; then, for Keras, the epoch. A run that was killed in
between finds the states by the number of updates that its weights have.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from tfscale.checkpoints.parts import ASIDE, write_aside
from tfscale.config import ConfigError
from tfscale.internals.optimizers import update_rule
from tfscale.optimizer.saving import save_beside

logger = logging.getLogger("tfscale")

STATES = "callbacks-"


@dataclass(frozen=True)
class Place:
    """What a backup is of.

    Attributes:
        epoch: That the run would go on with.
        iterations: Updates before it; None in backups that do not tell.
    """

    epoch: int
    iterations: int | None

    @property
    def name(self) -> str:
        """Part of the names of its files."""
        return f"{self.epoch}" if self.iterations is None else f"{self.epoch}-{self.iterations}"


def may_exist(path: str) -> bool:
    """Return whether a file is there, or the system does not say: to read it then fails."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def iterations_of(model: keras.Model) -> int:
    """Return the updates that the model's optimizer has made; weights are saved with them."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(update_rule(optimizer).iterations)


def find_place(folder: str, iterations: int, told: Place | None) -> Place:
    """Return the place whose states belong to weights with so many updates.

    Args:
        folder: Of the backup.
        iterations: Updates of the weights.
        told: What `read_metadata` returned; decides where several places have as many updates.

    Raises:
        ConfigError: There is none.
    """
    known = [place for path in Path(folder).glob(f"{STATES}*.npz") if (place := _place_of(path))]
    epoch = told.epoch if told is not None else -1
    found = [place for place in known if place.iterations == iterations]
    if found:
        return max(found, key=lambda place: (place.epoch == epoch, place.epoch))
    if Place(epoch, None) in known:
        logger.warning("Nobody knows whether weights and states of the backup %s belong together: "
                       "an earlier version wrote it.", folder)  # fmt: skip
        return Place(epoch, None)
    raise ConfigError(
        "The weights of a backup must have states of callbacks that belong to them. Received: "
        f"{folder} with weights of {iterations} updates, and states of "
        f"{sorted(place.name for place in known)} (epoch and updates). Compile with the same "
        "optimizer, or remove the folder to start afresh."
    )


def _place_of(path: Path) -> Place | None:
    match = re.fullmatch(rf"{STATES}(\d+)(?:-(\d+))?", path.stem)
    if match is None:
        return None
    return Place(int(match[1]), None if match[2] is None else int(match[2]))


def read_metadata(path: str) -> Place | None:
    """Return what `write_metadata` wrote; None if it is missing or was cut."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(Path(path).read_text())
        return Place(int(content["epoch"]), content.get("iterations"))
    return None


def write_metadata(path: str, place: Place, batch: int) -> None:
    """Write the epoch, where Keras looks for it; a finished file or the one before.

    Args:
        path: Of the file.
        place: What the backup is of.
        batch: The last one seen, as Keras counts.
    """
    content = {"epoch": place.epoch, "batch": batch, "iterations": place.iterations}
    write_aside(Path(path), lambda file: file.write(json.dumps(content).encode()))


def write_weights(save: Callable[..., Any], path: str) -> None:
    """Write the weights; a finished file or the one before.

    Args:
        save: The model's `save_weights`.
        path: Of the file.
    """

    def save_for_good(filepath: str, overwrite: bool) -> None:
        save(filepath, overwrite=overwrite)
        with open(filepath, "rb") as file:
            os.fsync(file.fileno())

    save_beside(save_for_good, path, overwrite=True)


def copy_aside(source: str, target: str) -> None:
    """Copy a file, if it is there; a finished copy or the one before."""
    if os.path.exists(source):
        beside = f"{target}{ASIDE}"
        shutil.copyfile(source, beside)
        os.replace(beside, target)


def remove_leftovers(folder: str) -> None:
    """Delete what was not finished by runs that were killed; nothing may be written meanwhile."""
    for pattern in (".rank*.weights.h5", f"*{ASIDE}"):
        for path in Path(folder).glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()
