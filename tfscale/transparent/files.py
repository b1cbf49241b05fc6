"""Files that a script makes, where every rank would make them at once.

What all ranks call together (`Dataset.save`, checkpoints, exports) is written by the first rank
that names a path, while the others wait. What one rank may call alone waits for no message:
downloads take turns by a lock on the host, caches get a name for each rank, and folders that
another rank has just made or removed count as made or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import logging
import os
import pathlib
import shutil
import socket
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfscale.callbacks import RankZero
from tfscale.comm import objects, runtime
from tfscale.config import ExchangeError, environment
from tfscale.files import read_json
from tfscale.internals.classes import Patches, arguments_of, folder_of_downloads
from tfscale.internals.keras import write_to
from tfscale.optimizer.saving import on_first_rank

logger = logging.getLogger("tfscale")

# Of this launcher and of others, equal on all ranks and not in another job.
_JOB_VARIABLES = (
    "TFSCALE_JOB",
    "TFSCALE_RESTART",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
_LOCKS = ".tfscale"  # folder in that of the downloads


class WrittenOnce(RankZero):
    """A callback that writes, on rank 0; every rank gives one to the same `fit` or `evaluate`.

    When that returns on any rank, the callback has ended on rank 0: its files are complete.
    """

    _is_training = False

    def set_model(self, model: keras.Model) -> None:
        """Expect a `fit` or `evaluate` of the model."""
        self._is_training = False
        super().set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin training on rank 0."""
        self._is_training = True
        super().on_train_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End training on rank 0; the others wait for it. Collective."""
        hook = super().on_train_end
        self._end_together(lambda: hook(logs))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """End a test on rank 0; the others wait for it, unless it is one of a `fit`."""
        hook = super().on_test_end
        if self._is_training:
            hook(logs)
        else:
            self._end_together(lambda: hook(logs))

    def _end_together(self, end: Callable[[], None]) -> None:
        """Run a last hook. If it fails, it fails on all ranks. Collective."""
        failure: Exception | None = None
        try:
            end()
        except ExchangeError:  # nothing can be sent any more
            raise
        except Exception as error:
            failure = error
        if not runtime.is_single():
            failure_text = "" if failure is None else f"{type(failure).__name__}: {failure}"
            objects.raise_together(
                failure_text,
                lambda errors: failure or self._incomplete(errors),
                "end of a writing callback",
            )
        elif failure is not None:
            raise failure

    def _incomplete(self, errors: str) -> ExchangeError:
        return ExchangeError(
            f"{type(self.callback).__name__} failed on rank 0, and its files are not complete. "
            f"Received: {errors}. Correct what it reports there."
        )


def patch(patches: Patches, began_s: float, shares_state: bool) -> None:
    """Patch what writes files.

    Args:
        patches: Takes the patches back.
        began_s: Time at which no rank had begun the script, in seconds since 1970.
        shares_state: Whether saved objects may have state that the ranks hold in parts.
    """
    patches.wrap_everywhere(keras.utils.get_file, Downloads().get_in_turn)
    patches.wrap_everywhere(urllib.request.urlretrieve, _retrieved_whole)
    patches.wrap(tf.data.Dataset, "cache", _named_apart)
    patches.wrap(tf.data.Dataset, "snapshot", _named_apart)
    patches.wrap(tf.data.Dataset, "save", _saved_once)
    patches.wrap_everywhere(tf.saved_model.save, _exported_once)
    patches.wrap_checkpoints(functools.partial(_checkpoint_once, shares_state))
    folders = Folders(began_s)
    for owner, name in ((os, "mkdir"), (os, "makedirs"), (pathlib.Path, "mkdir")):
        patches.wrap_for_program(owner, name, folders.make)
    patches.wrap_for_program(shutil, "rmtree", folders.remove)


# Downloads.


class Downloads:
    """Downloads by `keras.utils.get_file`, one at a time on each host."""

    def __init__(self) -> None:
        environ = environment()
        names = [environ[name] for name in _JOB_VARIABLES if name in environ]
        # Without them ranks of one host have one parent, the launcher's process there.
        self._job = " ".join(names) or f"{socket.gethostname()} {os.getppid()}"
        self._n_forced: Counter[Path | None] = Counter()

    def get_in_turn(self, get_file: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `get_file`: one rank of a host downloads, others find the file."""
        arguments = arguments_of(get_file, *args, **kwargs)
        names = (arguments["cache_subdir"], arguments["fname"], arguments["origin"])
        key = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
        lock = folder_of_downloads(arguments["cache_dir"]) / _LOCKS / key
        with _locked(lock) as (is_locked, has_waited):
            return self._take_turn(get_file, arguments, lock if is_locked else None, has_waited)

    def _take_turn(
        self, get_file: Any, arguments: dict[str, Any], path: Path | None, has_waited: bool
    ) -> Any:
        record = read_json(path) if path else {}
        job_record = record if record.get("job") == self._job else {}
        if has_waited and job_record.get("error"):
            raise ExchangeError(
                f"Could not download a file. Received: on another rank {job_record['error']}. "
                f"Look at {arguments['origin']}, or put the file into the folder."
            )
        n_forced = job_record.get("n_forced", 0)
        if arguments["force_download"]:
            self._n_forced[path] += 1
            arguments["force_download"] = n_forced < self._n_forced[path]  # else done for all
        record, error = {"job": self._job, "n_forced": max(n_forced, self._n_forced[path])}, ""
        try:
            return get_file(**arguments)
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            if path:
                path.write_text(json.dumps(record | {"error": error}))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[bool, bool]]:
    """Lock a file; yield whether that is possible there, and whether another process held the lock.

    The system frees the lock of a process that ends.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_waited = False
            except BlockingIOError:
                logger.info("Rank %d waits for a download.", runtime.rank())
                fcntl.flock(file, fcntl.LOCK_EX)
                has_waited = True
        except OSError as error:
            logger.warning("Downloads of several ranks may meet: no lock on %s (%s).", path, error)
            yield False, False
            return
        yield True, has_waited


def _retrieved_whole(
    urlretrieve: Any, url: str, filename: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Let a download appear under its name when it is complete."""
    if not filename:
        return urlretrieve(url, filename, *args, **kwargs)
    beside = f"{os.fspath(filename)}.rank{runtime.rank()}-{os.getpid()}"
    try:
        _, headers = urlretrieve(url, beside, *args, **kwargs)
        os.replace(beside, filename)
    finally:
        Path(beside).unlink(missing_ok=True)
    return filename, headers


# Datasets.


def _named_apart(method: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Let `cache` and `snapshot` write other files on each rank: they write while others read."""
    call = inspect.signature(method).bind(dataset, *args, **kwargs)
    for name in ("filename", "path"):
        if name in call.arguments:
            call.arguments[name] = _own_name(call.arguments[name])
    return method(*call.args, **call.kwargs)


def _own_name(name: Any) -> Any:
    is_path = isinstance(name, str | os.PathLike) and bool(os.fspath(name))
    # A complete cache of an earlier run is read only.
    if not is_path or runtime.rank() == 0 or os.path.exists(f"{os.fspath(name)}.index"):
        return name
    return f"{os.fspath(name)}.rank{runtime.rank()}"


def _saved_once(save: Any, dataset: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    on_first_rank(lambda: save(dataset, path, *args, **kwargs), "Dataset.save", path)


# Models and checkpoints.


def _exported_once(export: Any, obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> None:
    what = "tf.saved_model.save"
    on_first_rank(lambda: export(obj, export_dir, *args, **kwargs), what, export_dir)


def _checkpoint_once(
    shares_state: bool, write: Any, checkpoint: Any, file_prefix: Any, options: Any = None
) -> Any:
    """Let one rank write a `tf.train.Checkpoint`; all of them keep count of it."""
    written: list[Any] = []

    def write_here() -> None:
        written.append(write(checkpoint, file_prefix, options))

    def write_nowhere() -> None:  # all ranks gather what they hold in parts
        with tempfile.TemporaryDirectory() as folder:
            write(checkpoint, os.path.join(folder, "parts"))

    aside = write_nowhere if shares_state else None
    on_first_rank(write_here, "tf.train.Checkpoint", file_prefix, aside)
    if written:
        return written[0]
    path = os.fspath(file_prefix)
    for act in getattr(options, "experimental_write_callbacks", None) or ():
        act(path) if inspect.signature(act).parameters else act()
    return path


# Folders.


class Folders:
    """Folders that the script makes and removes itself, on every rank.

    Only calls of the script count: libraries make folders of their own, and take the error that a
    folder exists for an answer.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._made: set[str] = set()  # on this rank

    def make(self, make: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Make a folder, and take that of another rank for this one's."""
        name = os.path.abspath(path)
        try:
            make(path, *args, **kwargs)
        except FileExistsError:
            if name in self._made or not self._is_of_job(name):
                raise
        self._made.add(name)

    def remove(self, remove: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Remove a folder, but not one that another rank has made again."""
        if not isinstance(path, str | os.PathLike):
            return remove(path, *args, **kwargs)
        name = os.path.abspath(path)
        aside = f"{name}.removed-rank{runtime.rank()}-{os.getpid()}"
        with _locked_folder(os.path.dirname(name)):
            if not os.path.exists(name):
                self._made.discard(name)
                return None  # another rank was first, and may make it again at any time
            if name not in self._made and self._is_of_job(name):
                return None
            self._made.discard(name)
            # At once, so that no rank removes what another makes in its place.
            try:
                os.rename(name, aside)
            except FileNotFoundError:
                return None
            except OSError:
                aside = name
        return remove(aside, *args, **kwargs)

    def _is_of_job(self, name: str) -> bool:
        try:
            return os.path.isdir(name) and os.stat(name).st_ctime >= self._began_s
        except OSError:
            return False


@contextlib.contextmanager
def _locked_folder(path: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


# Callbacks.


def share_logs(loggers: Sequence[keras.callbacks.CSVLogger]) -> list[bool]:
    """Return for each logger whether all ranks run it, as they name other files. Collective.

    Each file is then written by the first rank that names it.
    """
    paths = [os.path.abspath(logger.filename) for logger in loggers]
    paths_by_rank = objects.allgather_object(paths, name="files of CSVLogger") if paths else [paths]
    differ = []
    for position, callback in enumerate(loggers):
        names = [of_rank[position] for of_rank in paths_by_rank]
        differ.append(len(set(names)) > 1)
        if differ[-1] and names.index(paths[position]) != runtime.rank():
            write_to(callback, os.devnull)
    return differ
