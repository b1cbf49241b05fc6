"""Run a script's `fit` as a measurement: shortened, without its backups and stops.

`measure_script` measures gradients at chosen epochs, in this process. As a program this module is
one rank of `tfscale tune groups`: it trains for some steps of local SGD and writes how far the
groups' models part. Usage: python -m tfscale.launcher.tune.scripts SETTINGS script.py ...; settings
are JSON, see `probe_groups`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfscale
from tfscale import callbacks as ours
from tfscale.callbacks.local_models import LocalModels
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.internals.keras import steps_until
from tfscale.internals.optimizers import update_rule
from tfscale.internals.traits import show_averages
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


class _Done(Exception):
    """The measurement is complete."""


def _run(words: Sequence[str], fit: Callable[..., Any]) -> None:
    """Run a script with its own arguments and import path, and another `keras.Model.fit`.

    Args:
        words: Path of the script, and its arguments.
        fit: Takes the place of Keras's; may end the script with `_Done`.
    """
    folder = str(Path(words[0]).resolve().parent)
    with (
        mock.patch.object(sys, "argv", list(words)),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.object(keras.Model, "fit", fit),
        contextlib.suppress(_Done),
    ):
        runpy.run_path(words[0], run_name="__main__")


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
        left_out: Classes of callbacks that are dropped, also where `RankZero` holds them.
    """
    given = inspect.signature(fit).bind(*arguments, **options).arguments
    callbacks = given.get("callbacks") or []
    if isinstance(callbacks, _of_keras.CallbackList):
        callbacks = callbacks.callbacks
    every = keras.tree.flatten(callbacks)
    kept = [c for c in every if not isinstance(getattr(c, "callback", c), left_out)]
    for callback in kept:
        if isinstance(callback, ours.AdaptiveBatchSize):
            callback.log_path, callback.verbose = None, 0
    names = sorted({type(c).__name__ for c in every if c not in kept})
    if names and (not runtime.is_initialized() or runtime.rank() == 0):
        logger.warning("A probe runs without the script's %s.", ", ".join(names))
    return given | {"callbacks": kept}


# Gradients at chosen epochs


def measure_script(
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
    measurements: list[_GradientMeasurement] = []
    fit = keras.Model.fit

    def measured_fit(model: Any, *args: Any, **options: Any) -> Any:
        given = arguments_of(fit, (model, *args), options, FILES_AND_STOPS)
        data = _readable(given)
        weights = given.get("class_weight")
        measurement = _GradientMeasurement(data, batch_sizes, at_epochs, samples, weights)
        measurements.append(measurement)
        given["callbacks"].append(measurement)
        return fit(**given)

    try:
        _run(words, measured_fit)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ConfigError(
                f"The script must run. Received: exit code {error.code} of {' '.join(words)}."
            ) from error
    stages = measurements[0].stages if measurements else []
    if not stages:
        raise ConfigError(
            "The script must train with model.fit, for as many epochs as the first stage. "
            f"Received: {' '.join(words)}, which ended before. Use --stages 0,1."
        )
    return stages


class _GradientMeasurement(keras.callbacks.Callback):
    """Measures at chosen epochs of a `fit`, then ends it.

    Epochs are counted from the first of this `fit`, whatever number that one has.
    """

    def __init__(
        self,
        data: GlobalBatches,
        batch_sizes: Sequence[int],
        at_epochs: Sequence[int],
        samples: int,
        class_weight: Any,
    ) -> None:
        super().__init__()
        self.stages: list[Stage] = []
        self._data, self._sizes, self._samples = data, batch_sizes, samples
        self._class_weight = class_weight
        self._left = sorted(set(at_epochs))
        self._n_trained = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measure before the first step, if that is asked for."""
        self._measure()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measure after the last epoch that counts; the next one need not begin."""
        self._n_trained += 1
        self._measure()

    def _measure(self) -> None:
        epoch = self._n_trained
        if self._left and self._left[0] == epoch:
            self._left.pop(0)
            given = self._data, self._sizes, self._samples
            stage = measure(self.model, *given, epoch=epoch, class_weight=self._class_weight)
            self.stages.append(stage)
        if not self._left:
            raise _Done


def _readable(given: dict[str, Any]) -> GlobalBatches:
    """Return what `fit` is given to train on."""
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
    data, y = given.get("x"), given.get("y")
    if not isinstance(data, GlobalBatches):
        is_array = hasattr(data, "shape") or isinstance(data, dict | list | tuple)
        if not is_array or y is None:
            raise ConfigError(
                "The script must train on data that can be read in batches of any size. Received: "
                f"{type(data).__name__}. Use tfscale.data.GlobalBatches, or arrays x and y."
            )
        data = GlobalBatches(data, y, sample_weight=given.get("sample_weight"), batch_size=1)
    return data


# Distances between the groups of local SGD


def probe_groups(words: Sequence[str], settings: dict[str, Any]) -> None:
    """Run a script until its first `fit` has made enough steps of local SGD. Collective.

    Args:
        words: The script and its arguments.
        settings: "groups", "interval", "steps", "rate_rule", "learning_rate" (or None), and
            "output": the JSON file that rank 0 writes.

    Raises:
        ConfigError: It trains without a DistributedOptimizer, or changes its learning rate.
    """
    _run(words, probed_fit(settings))
    if runtime.is_initialized():
        tfscale.shutdown()


def probed_fit(settings: dict[str, Any]) -> Callable[..., Any]:
    """Return what takes the place of Keras's `fit`; it ends with an exception of its own.

    Args:
        settings: As for `probe_groups`.
    """
    fit = keras.Model.fit

    def run(model: Any, *args: Any, **options: Any) -> Any:
        _regroup(model, settings)
        left_out = FILES_AND_STOPS + RATES_AND_SIZES
        given = arguments_of(fit, (model, *args), options, left_out)
        _enlarge(given.get("x"), settings["groups"])
        record = ours.ModelDistance()
        # A script without groups need not unite any; two that do would lose the groups' models.
        unite = [] if show_averages(given["callbacks"]) else [LocalModels()]
        given["callbacks"] += [*unite, record, _GroupsProbe(settings, record)]
        return fit(**given | {"epochs": 10**6})

    return run


class _GroupsProbe(ours.Callback):
    """Ends a `fit` after some steps and writes the distances that `record` has."""

    def __init__(self, settings: dict[str, Any], record: ours.ModelDistance) -> None:
        super().__init__()
        self._settings, self._record = settings, record
        self._n_steps = self._n_before = 0
        self._rate = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Remember the rate."""
        super().on_train_begin(logs)
        self._rate = self._present_rate()

    def _present_rate(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count from what the epochs before have made."""
        super().on_epoch_begin(epoch, logs)
        self._n_before = self._n_steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count steps, also several of an execution; write the result after the last."""
        super().on_train_batch_end(batch, logs)
        self._n_steps = self._n_before + steps_until(self.model, batch)
        if self._present_rate() != self._rate:
            raise ConfigError(
                "Distances are compared at one learning rate. Received: a rate that the script "
                f"changes from {self._rate:.6g} to {self._present_rate():.6g} in step "
                f"{self._n_steps}. Leave the callback that does so out of the probe, and pass "
                "--learning-rate."
            )
        if self._n_steps < self._settings["steps"]:
            return
        loss = float(tfscale.allreduce(np.float64((logs or {}).get("loss", math.nan))))
        if runtime.rank() == 0:
            result = {
                "groups": self._settings["groups"],
                "interval": self._settings["interval"],
                "learning_rate": self._rate,
                "distances": [distance for _, distance in self._record.distances],
                "loss": loss,
            }
            Path(self._settings["output"]).write_text(json.dumps(result))
        raise _Done


def _regroup(model: Any, settings: dict[str, Any]) -> None:
    """Replace the exchange of a model's optimizer by local SGD; its rule stays."""
    optimizer = model.optimizer
    if type(optimizer) is not tfscale.DistributedOptimizer:
        raise ConfigError(
            "The script must use tfscale.DistributedOptimizer. Received: "
            f"{type(optimizer).__name__}. Wrap the optimizer."
        )
    n = settings["groups"]
    factor = {"linear": n, "sqrt": math.sqrt(n), "none": 1.0}[settings["rate_rule"]]
    inner: Any = update_rule(optimizer)
    is_number = isinstance(inner._learning_rate, keras.Variable)
    if not (is_number or settings["learning_rate"]):
        raise ConfigError(
            "A probe needs one learning rate, that of training after warm-up. Received: a "
            f"{type(inner._learning_rate).__name__}. Pass --learning-rate."
        )
    rate = settings["learning_rate"] or float(keras.ops.convert_to_numpy(inner._learning_rate))
    if is_number:
        inner.learning_rate = rate * factor
    else:  # Keras does not let a number take the place of a schedule
        inner._learning_rate = keras.Variable(rate * factor, name="learning_rate", trainable=False)
    exchange = tfscale.LocalSGD(n, settings["interval"], within="allreduce")
    op = optimizer.options.op
    model.optimizer = tfscale.DistributedOptimizer(optimizer.__wrapped__, exchange=exchange, op=op)


def _enlarge(data: Any, groups: int) -> None:
    """Give each group of one rank the `GlobalBatches` that the script has for all, as [L] does."""
    if isinstance(data, GlobalBatches):
        data.batch_size *= groups


if __name__ == "__main__":
    probe_groups(sys.argv[2:], json.loads(sys.argv[1]))
