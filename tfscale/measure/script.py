"""Run a script's `fit` as a measurement: shortened, without its backups and stops."""

from __future__ import annotations

import contextlib
import inspect
import logging
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras

from tfscale import callbacks as ours
from tfscale.callbacks.adaptive_record import AdaptiveRecord
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.reading import weigh_classes
from tfscale.measure.batch_size import Stage, measure

logger = logging.getLogger("tfscale")

_of_keras = keras.callbacks
# Those that begin a file anew would empty that of the user's last run.
FILES_AND_STOPS: tuple[type, ...] = (
    _of_keras.BackupAndRestore,
    _of_keras.ModelCheckpoint,
    _of_keras.CSVLogger,
    _of_keras.TensorBoard,
    _of_keras.RemoteMonitor,
    _of_keras.EarlyStopping,
    _of_keras.TerminateOnNaN,
    ours.BackupAndRestore,
    ours.Checkpoint,
    ours.CommunicationReport,
    ours.ModelDistance,
)
if hasattr(_of_keras, "OrbaxCheckpoint"):  # not in the lowest Keras that is supported
    FILES_AND_STOPS += (_of_keras.OrbaxCheckpoint,)
RATES_AND_SIZES = (
    _of_keras.LearningRateScheduler,
    _of_keras.ReduceLROnPlateau,
    ours.LearningRateScheduleCallback,
    ours.AdaptiveBatchSize,
    ours.BatchSizeSchedule,
    _of_keras.SwapEMAWeights,  # groups have no average over time in common
)


def arguments_of(
    fit: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    left_out: tuple[type, ...],
) -> dict[str, Any]:
    """Return by name what a script gives to `fit`, without some of its callbacks.

    `AdaptiveBatchSize`, where it stays, sets batches and rates and writes no record.

    Args:
        fit: Keras's.
        arguments: By position, the model among them.
        options: By name.
        left_out: Classes of callbacks; one is told of, also where `RankZero` holds it.
    """
    given = inspect.signature(fit).bind(*arguments, **options).arguments
    callbacks = given.get("callbacks") or []
    if isinstance(callbacks, _of_keras.CallbackList):
        callbacks = callbacks.callbacks
    every = keras.tree.flatten(callbacks)
    kept = [c for c in every if not isinstance(getattr(c, "callback", c), left_out)]
    for callback in kept:
        if isinstance(callback, ours.AdaptiveBatchSize):
            callback._record = AdaptiveRecord(None)
    names = sorted({type(c).__name__ for c in every if c not in kept})
    if names and (not runtime.is_initialized() or runtime.rank() == 0):
        logger.warning("A probe runs without the script's %s.", ", ".join(names))
    return given | {"callbacks": kept}


class BatchSizeProbe(keras.callbacks.Callback):
    """Measures at chosen epochs of a `fit`, then ends it.

    Args:
        data: What `fit` trains on.
        batch_sizes: See `measure`.
        at_epochs: Epochs that this `fit` trained before each measurement; 0 is before its first
            step, whatever number that epoch has.
        samples: See `measure`.
    """

    def __init__(
        self, data: GlobalBatches, batch_sizes: Sequence[int], at_epochs: Sequence[int],
        samples: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stages: list[Stage] = []
        self._data, self._sizes, self._samples = data, batch_sizes, samples
        self._left = sorted(set(at_epochs))
        self._n_trained = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measure before this epoch, if that is asked for."""
        self._measure()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measure after the last epoch that counts; the next one need not begin."""
        self._n_trained += 1
        self._measure()

    def _measure(self) -> None:
        epoch = self._n_trained
        if self._left and self._left[0] == epoch:
            self._left.pop(0)
            self.stages.append(
                measure(self.model, self._data, self._sizes, self._samples, epoch=epoch)
            )
        if not self._left:
            raise _Measured


class _Measured(Exception):
    """All stages are measured."""


def probe_script(
    words: Sequence[str], *, batch_sizes: Sequence[int], at_epochs: Sequence[int], samples: int
) -> list[Stage]:
    """Run a training script in this process until all stages are measured.

    Args:
        words: Path of the script, and its arguments.
        batch_sizes: See `measure`.
        at_epochs: Epochs trained before each measurement.
        samples: See `measure`.

    Returns:
        The stages that the first `fit` of the script reached.

    Raises:
        ConfigError: There is no such script, it trains on data that cannot be read in other
            batches, runs on several ranks, or ended before the first stage.
    """
    if not Path(words[0]).is_file():
        raise ConfigError(f"There must be a training script. Received: {words[0]}: no such file.")
    probes: list[BatchSizeProbe] = []

    def make_probe(data: Any) -> BatchSizeProbe:
        probes.append(BatchSizeProbe(data, batch_sizes, at_epochs, samples))
        return probes[-1]

    with as_main(words), _probed(make_probe):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except _Measured:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ConfigError(
                    f"The script must run. Received: exit code {error.code} of {' '.join(words)}."
                ) from error
    stages = probes[0].stages if probes else []
    if not stages:
        raise ConfigError(
            "The script must train with model.fit, for as many epochs as the first stage. "
            f"Received: {' '.join(words)}, which ended before. Use --stages 0,1."
        )
    return stages


@contextlib.contextmanager
def as_main(words: Sequence[str]) -> Iterator[None]:
    """Let a script see the arguments and the import path that it has when started by itself."""
    folder = str(Path(words[0]).resolve().parent)
    argv = mock.patch.object(sys, "argv", list(words))
    with argv, mock.patch.object(sys, "path", [folder, *sys.path]):
        yield


@contextlib.contextmanager
def _probed(make_probe: Any) -> Iterator[None]:
    """Add a probe to each `fit`."""
    fit = keras.Model.fit

    def probed_fit(model: Any, *args: Any, **options: Any) -> Any:
        given = arguments_of(fit, (model, *args), options, FILES_AND_STOPS)
        given["callbacks"].append(make_probe(_readable(given)))
        return fit(**given)

    with mock.patch.object(keras.Model, "fit", probed_fit):
        yield


def _readable(given: dict[str, Any]) -> GlobalBatches:
    """Return what `fit` is given to train on, with its weights."""
    if runtime.is_initialized() and runtime.size() > 1:
        raise ConfigError(
            "Gradients are measured in one process. Received: "
            f"{runtime.size()} ranks. Run `tfscale tune batch-size` without a launcher."
        )
    if given.get("validation_split") and given.get("validation_data") is None:
        raise ConfigError(
            "The samples that are trained on must be known. Received: "
            f"validation_split={given['validation_split']}. Split the data in the script, and pass "
            "validation_data to fit."
        )
    data = _batches(given.get("x"), given.get("y"), given.get("sample_weight"))
    weights = given.get("class_weight")
    return data if weights is None else weigh_classes(data, weights)


def _batches(x: Any, y: Any, weights: Any) -> GlobalBatches:
    if isinstance(x, GlobalBatches):
        return x
    is_array = hasattr(x, "shape") or isinstance(x, dict | list | tuple)
    if is_array and y is not None:
        return GlobalBatches(x, y, sample_weight=weights, batch_size=1)
    raise ConfigError(
        "The script must train on data that can be read in batches of any size. Received: "
        f"{type(x).__name__}. Use tfscale.data.GlobalBatches, or arrays x and y."
    )
