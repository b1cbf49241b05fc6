"""Save a model from several ranks, each path once and whole; load it to resume training."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tfscale.comm import objects, runtime
from tfscale.comm.compression import Compression
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import ConfigError, ExchangeError
from tfscale.internals.keras import wrap_once
from tfscale.internals.optimizers import optimizer_of
from tfscale.optimizer.distributed import (
    DistributedOptimizer,
    distributed_optimizers,
    sharded_states,
)

logger = logging.getLogger("tfscale")

_HDF5 = (".h5", ".hdf5")  # names by which Keras knows its older format


def load_model(
    filepath: str,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> keras.Model:
    """Load a saved model and wrap its optimizer again. Call it on every rank.

    Args:
        filepath: A file that `model.save` wrote, with or without tfscale.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: Other classes and functions by name, as for keras.models.load_model.
        compression: As for `DistributedOptimizer`.
        legacy_opts: Ignored; kept for scripts written for Horovod.
        **options: Further arguments of `DistributedOptimizer`.

    Returns:
        The model, compiled with a distributed optimizer that holds the saved state, or as it was
        saved if it has no optimizer.

    Raises:
        ValueError: Keras cannot load the file.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
        >>> model.save("model.keras")
        >>> loaded = tfscale.load_model("model.keras")
        >>> isinstance(loaded.optimizer, tfscale.DistributedOptimizer)
        True
        >>> float(loaded.optimizer.learning_rate)
        0.5
    """
    del legacy_opts
    objects = {c.__name__: c for c in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if optimizer_of(model) is not None:  # None for a model saved without one
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model


def make_saves_safe(model: keras.Model) -> None:
    """Let several ranks save to the same path at the same time.

    A plain `keras.callbacks.ModelCheckpoint` on every rank writes the same file from all ranks at
    once, which damages `.keras` files, fails on the lock of `.h5` files and on a folder that
    another rank has just created. Afterwards `model.save` and `model.save_weights` write a
    temporary file and rename it: a file is complete when it appears, and the last one remains. If
    ranks share the optimizer's state they save together; see `save_together`.
    """
    wrap_once(model, "save", lambda save: _safe(model, save, "model.save"))
    wrap_once(model, "save_weights", lambda save: _safe(model, save, "model.save_weights"))


def _safe(model: keras.Model, save: Callable[..., Any], what: str) -> Callable[..., Any]:
    def safe_save(filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        def write() -> None:
            name = str(filepath)
            with contextlib.ExitStack() as stack:
                # For this format Keras reads the optimizer's `variables`.
                if name.endswith(_HDF5) and not name.endswith(".weights.h5"):
                    for optimizer in distributed_optimizers(model):
                        kept = optimizer.bound.kept
                        if kept is not None:
                            stack.enter_context(kept.complete_variables())
                save_beside(save, filepath, overwrite, *args, **kwargs)

        if sharded_states(model):
            save_together(model, filepath, write, what)
        else:
            on_first_rank(write, what, filepath)

    return safe_save


_is_written_once = False  # whether all ranks call saves, and rank 0 writes for all
_is_alone = False  # whether what runs is called on one rank
_told: set[str] = set()  # calls whose paths differ


def write_on_first_rank(is_written_once: bool) -> None:
    """Set whether saves are called on all ranks and written by rank 0."""
    global _is_written_once
    _is_written_once = is_written_once


def is_written_once() -> bool:
    """Return whether saves are called on all ranks and written by rank 0."""
    return _is_written_once


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Mark a block as one that runs on one rank: its saves do not wait for other ranks."""
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def is_alone() -> bool:
    """Return whether what runs is known to be called on one rank."""
    return _is_alone


def on_first_rank(
    write: Callable[[], None], what: str, path: Any = "", aside: Callable[[], None] | None = None
) -> None:
    """Write on the first rank that names a path; return on all when it is done. Collective.

    Ranks name other paths where a name is drawn (`tempfile.mkdtemp`) or holds the time: each path
    is then written by a rank that reads it. Without `write_on_first_rank(True)`, and in a block
    that runs `alone`, write at once. Ranks that do not write call `aside`.
    """
    if _is_alone or not _is_written_once:
        write()
        return
    is_writer, paths = _first_of(path, what)
    differ = len(set(paths)) > 1 and isinstance(path, (str, os.PathLike))
    if differ and runtime.rank() == 0 and what not in _told:
        _told.add(what)
        other = next(rank for rank, name in enumerate(paths) if name != paths[0])
        logger.warning(
            "%s: each rank writes a file of its own, as paths differ: %s on rank 0, %s on rank %d. "
            "For one file use a fixed name, or tfscale.broadcast_object(path).",
            *(what, paths[0], paths[other], other),
        )
    action = write if is_writer else aside
    with alone() if is_writer and aside is None else contextlib.nullcontext():
        error = "" if action is None else _error_of(action)
    objects.raise_together(error, _unwritten, what)


def _first_of(
    path: Any, what: str, process_set: ProcessSet = global_process_set
) -> tuple[bool, list[str]]:
    """Return whether this rank is the first that names its path, and all paths. Collective."""
    is_path = isinstance(path, (str, os.PathLike))
    name = os.path.abspath(os.fspath(path)) if is_path else f"object on {runtime.rank()}"
    names = objects.allgather_object(name, what, process_set)
    return names.index(name) == process_set.rank(), names


def _error_of(action: Callable[[], None]) -> str:
    """Run an action; return its error in words, or an empty string."""
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


def save_beside(
    save: Callable[..., Any], filepath: Any, overwrite: bool, *args: Any, **kwargs: Any
) -> None:
    """Save under another name, then rename; the arguments are those of Keras's `save`.

    Without `overwrite` Keras asks the user, and the file is not renamed.
    """
    path = Path(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    is_file = path is not None and path.suffix in (".keras", *_HDF5) and not path.is_dir()
    is_remote = "://" in str(filepath)
    if path is None or not is_file or is_remote or not overwrite or args or kwargs:
        save(filepath, overwrite, *args, **kwargs)
        return
    beside = path.with_name(f".rank{runtime.rank()}-{os.getpid()}-{path.name}")
    try:
        save(str(beside), overwrite)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def save_together(model: keras.Model, filepath: Any, write: Callable[[], None], what: str) -> None:
    """Save a model whose optimizer state is shared: the first rank that names a path writes it.

    Collective, unless the state was gathered before (`full_state`, save points of `fit`): then
    the rank that has it writes, and all others write nothing. `write` writes the file on a rank
    that has the complete state; `what` is the user's call, for messages.
    """
    states = sharded_states(model)
    if all(kept.is_gathered for kept in states):
        if all(kept.is_here for kept in states):
            write()
        else:
            logger.info("%s(%s): the rank that keeps the state writes.", what, filepath)
        return
    if _is_alone:
        raise ConfigError(
            f"{what} must run on all ranks, which hold parts of the optimizer's state. Received: "
            f"{what}({filepath}) in a callback that runs on rank 0 only. Use "
            "keras.callbacks.ModelCheckpoint, or exchange='allreduce'."
        )
    process_set = states[0].process_set
    states[0].meet(what)
    is_writer, _ = _first_of(filepath, what, process_set)
    for kept in states:
        kept.gather(is_kept=is_writer)
    error = _error_of(write) if is_writer else ""
    for kept in states:
        kept.forget()
    objects.raise_together(error, _unwritten, what, process_set)


def _unwritten(errors: str) -> ExchangeError:
    return ExchangeError(f"Could not write files. Received: {errors}.")
