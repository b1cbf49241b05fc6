"""Checkpoints of which one rank writes one file."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import keras

from tfscale import runtime


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` that writes on rank 0 only.

    Arguments are those of Keras. It never communicates, so it may be given to `fit` on every rank
    or on rank 0 only. All ranks that have it make the same decisions, given logs equal on all
    ranks (`MetricAverageCallback` comes first), so `best` agrees everywhere.
    """

    filepath: str
    verbose: int
    _model: Any

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        if runtime.rank() == 0:
            super()._save_model(epoch, batch, logs)
            return
        shown = self._model, self.filepath, self.verbose
        self._model, self.filepath, self.verbose = _NeverSaved(), os.path.basename(self.filepath), 0
        try:
            super()._save_model(epoch, batch, logs)
        finally:
            self._model, self.filepath, self.verbose = shown


class _NeverSaved:
    """Stands in for the model on ranks that decide but do not write."""

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    save_weights = save


def make_saves_safe(model: keras.Model) -> None:
    """Let several ranks save to the same path at the same time.

    A plain `keras.callbacks.ModelCheckpoint` on every rank writes the same file from all ranks at
    once, which damages `.keras` files, fails on the lock of `.h5` files and on a folder that
    another rank has just created. Afterwards `model.save` and `model.save_weights` write beside
    the target and rename: a file is complete when it appears, and the last one stays.

    Args:
        model: The model; its methods are replaced once.
    """
    for name in ("save", "save_weights"):
        if name not in model.__dict__:
            model.__dict__[name] = _atomic(getattr(model, name))
    plain = keras.callbacks.ModelCheckpoint
    if not hasattr(plain._save_model, "__wrapped__"):
        plain._save_model = _with_folder(plain._save_model)


def _with_folder(save_model: Any) -> Any:
    @functools.wraps(save_model)
    def save_with_folder(self: Any, epoch: int, batch: int | None, logs: Any) -> None:
        folder = os.path.dirname(self.filepath)
        if folder and "{" not in folder and "://" not in folder:
            os.makedirs(folder, exist_ok=True)
        save_model(self, epoch, batch, logs)

    return save_with_folder


def _atomic(save: Any) -> Any:
    def save_beside(filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        path = Path(filepath) if isinstance(filepath, (str, os.PathLike)) else None
        is_file = path is not None and path.suffix in (".keras", ".h5") and not path.is_dir()
        is_remote = "://" in str(filepath)
        if path is None or not is_file or is_remote or not overwrite or args or kwargs:
            return save(filepath, overwrite, *args, **kwargs)
        beside = path.with_name(f".rank{runtime.rank()}-{os.getpid()}-{path.name}")
        try:
            save(str(beside), overwrite)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    return save_beside
