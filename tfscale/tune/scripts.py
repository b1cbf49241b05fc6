"""Run a script's `fit` as a measurement: shortened, without its backups and stops.

`measure_script` measures gradients at chosen epochs, in this process. As a program this module is
one rank of `tfscale tune groups`: it trains for some steps of local SGD and writes the distances
between the groups' models; or one of `tfscale tune compression`, which writes steps and a metric.
Usage: python -m tfscale.tune.scripts SETTINGS script.py ...
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

import keras
import numpy as np

import tfscale
from tfscale import callbacks as ours
from tfscale.callbacks.local_models import LocalModels
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.internals.classes import Patches
from tfscale.internals.keras import (
    replace_optimizer,
    steps_until,
)
from tfscale.internals.optimizers import rate_of, set_rate, update_rule
from tfscale.internals.traits import show_averages
from tfscale.measure.batch_size import Stage, measure
from tfscale.measure.compression import read_steps
from tfscale.measure.growth import RATE_RULES

logger = logging.getLogger("tfscale")

_of_keras = keras.callbacks
# Callbacks that rewrite a file would empty that of the user's last run.
FILES_AND_STOPS: tuple[type, ...] = (
    *(_of_keras.BackupAndRestore, _of_keras.ModelCheckpoint, _of_keras.CSVLogger),
    *(_of_keras.TensorBoard, _of_keras.RemoteMonitor),
    *(_of_keras.EarlyStopping, _of_keras.TerminateOnNaN),
    *(ours.BackupAndRestore, ours.Checkpoint, ours.CommunicationReport, ours.ModelDistance),
    ours.ThetaMonitor,
)
if hasattr(_of_keras, "OrbaxCheckpoint"):  # not in the lowest Keras that is supported
    FILES_AND_STOPS += (_of_keras.OrbaxCheckpoint,)
RATES_AND_SIZES = (
    *(_of_keras.LearningRateScheduler, _of_keras.ReduceLROnPlateau),
    *(ours.LearningRateScheduleCallback, ours.AdaptiveBatchSize, ours.BatchSizeSchedule),
    _of_keras.SwapEMAWeights,  # groups have no average over time in common
)


class Done(Exception):
    """The measurement is complete."""


def _run(command: Sequence[str], fit: Callable[..., Any]) -> None:
    """Run a script with its arguments and import path, and with `fit` in place of Keras's."""
    folder = str(Path(command[0]).resolve().parent)
    with Patches() as patches, contextlib.suppress(Done):
        patches.replace(sys, "argv", list(command))
        patches.replace(sys, "path", [folder, *sys.path])
        patches.replace(keras.Model, "fit", fit)
        runpy.run_path(command[0], run_name="__main__")


def arguments_of(
    fit: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    left_out: tuple[type, ...],
) -> dict[str, Any]:
    """Return a script's arguments of `fit` by name, without callbacks of the classes `left_out`.

    An `AdaptiveBatchSize` that stays sets batches and rates, but writes no log.
    """
    bound = inspect.signature(fit).bind(*arguments, **options).arguments
    callbacks = bound.get("callbacks") or []
    if isinstance(callbacks, _of_keras.CallbackList):
        callbacks = callbacks.callbacks
    all_callbacks = keras.tree.flatten(callbacks)
    kept = [c for c in all_callbacks if not isinstance(getattr(c, "callback", c), left_out)]
    for callback in kept:
        if isinstance(callback, ours.AdaptiveBatchSize):
            callback.silence()
    names = sorted({type(c).__name__ for c in all_callbacks if c not in kept})
    if names and (not runtime.is_initialized() or runtime.rank() == 0):
        logger.warning("A probe runs without the script's %s.", ", ".join(names))
    return bound | {"callbacks": kept}


# Gradients at chosen epochs


def measure_script(
    command: Sequence[str], *, batch_sizes: Sequence[int], at_epochs: Sequence[int], samples: int
) -> list[Stage]:
    """Run a training script in this process; return the stages that its first `fit` reached.

    `command` is the path of the script and its arguments, `at_epochs` the epochs trained before
    each call of `measure`, counted from the first of the `fit`.
    """
    if not Path(command[0]).is_file():
        raise ConfigError(f"script must be a file. Received: {command[0]}: no such file.")
    fits: list[list[Stage]] = []
    fit = keras.Model.fit

    def measured_fit(model: Any, *args: Any, **options: Any) -> Any:
        bound = arguments_of(fit, (model, *args), options, FILES_AND_STOPS)
        data, first = _readable(bound), bound.get("initial_epoch") or 0
        stages: list[Stage] = []
        fits.append(stages)
        left = sorted(set(at_epochs))

        def look(n_trained: int) -> None:
            if left and left[0] == n_trained:
                left.pop(0)
                weights = bound.get("class_weight")
                measured = measure(
                    model, data, batch_sizes, samples, epoch=n_trained, class_weight=weights
                )
                stages.append(measured)
            if not left:
                raise Done

        watch = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: look(epoch - first),
            on_epoch_end=lambda epoch, logs: look(epoch + 1 - first),  # the next need not begin
        )
        return fit(**bound | {"callbacks": [*bound["callbacks"], watch]})

    try:
        _run(command, measured_fit)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ConfigError(
                f"script failed. Received: exit code {error.code} of {' '.join(command)}."
            ) from error
    if not fits or not fits[0]:
        raise ConfigError(
            "script must train with model.fit, for as many epochs as the first stage. Received: "
            f"{' '.join(command)}, which ended before. Use --stages 0,1."
        )
    return fits[0]


def _readable(bound: dict[str, Any]) -> GlobalBatches:
    """Return the training data of `fit`."""
    if runtime.is_initialized() and runtime.size() > 1:
        raise ConfigError(
            f"`tfscale tune batch-size` needs one process. Received: {runtime.size()} ranks. Run "
            "it without a launcher."
        )
    if bound.get("validation_split") and bound.get("validation_data") is None:
        raise ConfigError(
            "validation_split must be left out. Received: "
            f"validation_split={bound['validation_split']}. Split the data in the script, and "
            "pass validation_data to fit."
        )
    data, y = bound.get("x"), bound.get("y")
    if not isinstance(data, GlobalBatches):
        is_array = hasattr(data, "shape") or isinstance(data, dict | list | tuple)
        if not is_array or y is None:
            raise ConfigError(
                "script must train on data that can be read in batches of any size. Received: "
                f"{type(data).__name__}. Use tfscale.data.GlobalBatches, or arrays x and y."
            )
        data = GlobalBatches(data, y, sample_weight=bound.get("sample_weight"), batch_size=1)
    return data


# Distances between the groups of local SGD


def probed_fit(settings: dict[str, Any]) -> Callable[..., Any]:
    """Return a replacement of Keras's `fit`: some steps of local SGD, then `Done`.

    `settings` has "groups", "interval", "steps", "rate_rule", "learning_rate" (or None), and
    "output", the JSON file that rank 0 writes.
    """
    fit = keras.Model.fit

    def run(model: Any, *args: Any, **options: Any) -> Any:
        regroup(model, settings)
        left_out = FILES_AND_STOPS + RATES_AND_SIZES
        bound = arguments_of(fit, (model, *args), options, left_out)
        enlarge(bound.get("x"), settings["groups"])
        record = ours.ModelDistance()
        # A script may have no callback that averages groups; two would lose the groups' models.
        unite = [] if show_averages(bound["callbacks"]) else [LocalModels()]
        bound["callbacks"] += [*unite, record, GroupsProbe(settings, record)]
        return fit(**bound | {"epochs": 10**6})

    return run


class GroupsProbe(ours.Callback):
    """Ends a `fit` after some steps and writes the distances in `record`."""

    def __init__(self, settings: dict[str, Any], record: ours.ModelDistance) -> None:
        super().__init__()
        self._settings, self._record = settings, record
        self._n_steps = self._n_before = 0
        self._losses: list[float] = []  # of each step
        self._rate = 0.0

    def _present_rate(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Record the learning rate."""
        super().on_train_begin(logs)
        self._rate = self._present_rate()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the number of steps before the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._n_before = self._n_steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the losses of new steps; write the result and end training after the last."""
        super().on_train_batch_end(batch, logs)
        self._n_steps = self._n_before + steps_until(self.model, batch)
        # Keras reports the mean since the epoch began.
        n_new = self._n_steps - len(self._losses)
        total = (logs or {}).get("loss", math.nan) * (self._n_steps - self._n_before)
        self._losses += [(total - sum(self._losses[self._n_before :])) / n_new] * n_new
        if self._present_rate() != self._rate:
            raise ConfigError(
                "learning rate must not change in a probe. Received: a rate that the script "
                f"changes from {self._rate:.6g} to {self._present_rate():.6g} in step "
                f"{self._n_steps}. Leave the callback that does so out of the probe, and pass "
                "--learning-rate."
            )
        if self._n_steps < self._settings["steps"]:
            return
        losses = np.asarray(tfscale.allreduce(np.array(self._losses)))
        if runtime.rank() == 0:
            result = {
                **{name: self._settings[name] for name in ("groups", "interval")},
                "learning_rate": self._rate,
                "distances": [distance for _, distance in self._record.distances],
                "losses": losses.tolist(),
            }
            Path(self._settings["output"]).write_text(json.dumps(result))
        raise Done


def regroup(model: Any, settings: dict[str, Any]) -> None:
    """Replace the exchange of a model's optimizer by local SGD; its rule stays."""
    optimizer = model.optimizer
    _require_distributed(optimizer)
    n = settings["groups"]
    factor = RATE_RULES[settings["rate_rule"]](n)
    inner: Any = update_rule(optimizer)
    rate = settings["learning_rate"]
    if not rate:
        held = rate_of(inner)
        if not isinstance(held, keras.Variable):
            raise ConfigError(
                "--learning-rate must be that of training after warm-up. Received: a "
                f"{type(held).__name__}. Pass --learning-rate."
            )
        rate = float(keras.ops.convert_to_numpy(held))
    set_rate(inner, rate * factor)
    exchange = tfscale.LocalSGD(n, settings["interval"], within="allreduce")
    op = optimizer.bound.executor.options.op
    replaced = tfscale.DistributedOptimizer(optimizer.__wrapped__, exchange=exchange, op=op)
    replace_optimizer(model, replaced)


def _require_distributed(optimizer: Any) -> None:
    if type(optimizer) is not tfscale.DistributedOptimizer:
        raise ConfigError(
            "script must use tfscale.DistributedOptimizer. Received: "
            f"{type(optimizer).__name__}. Wrap the optimizer."
        )


def enlarge(data: Any, groups: int) -> None:
    """Give each group, which is one rank, batches as large as those of all ranks, as in [L]."""
    if isinstance(data, GlobalBatches):
        data.batch_size *= groups


# Trainings with several compressions


def train_compressed(command: Sequence[str], settings: dict[str, Any]) -> None:
    """Train a script's model with a compression and a seed; rank 0 writes steps and a metric.

    `settings` has "compression", "start_step" (of int4 and low_rank), "seed", "epochs" (or None:
    the script's), and "output", a JSON file; also written where the compression is refused.
    """
    name, seed, output = settings["compression"], settings["seed"], Path(settings["output"])
    compression = getattr(tfscale.Compression, name)
    if getattr(compression, "start_step", 0) != 0:
        compression = compression(start_step=settings["start_step"])
    build, fit = tfscale.DistributedOptimizer.__init__, keras.Model.fit
    set_seed = keras.utils.set_random_seed

    def write(**outcome: Any) -> None:
        if not runtime.is_initialized() or runtime.rank() == 0:
            output.write_text(json.dumps({"compression": name, "seed": seed, **outcome}))

    def compressed(*args: Any, **options: Any) -> None:
        bound = inspect.signature(build).bind(*args, **options)
        bound.arguments["compression"] = compression
        build(*bound.args, **bound.kwargs)

    def short_fit(model: Any, *args: Any, **options: Any) -> Any:
        bound = arguments_of(fit, (model, *args), options, FILES_AND_STOPS)
        epochs = settings["epochs"] or bound.get("epochs", 1)
        if isinstance(bound.get("x"), GlobalBatches):
            bound["x"].restore(bound["x"].state() | {"seed": seed})

        def end(epoch: int, logs: dict[str, Any]) -> None:
            if epoch + 1 < epochs:
                return
            metric = min(logs, key=lambda n: (not n.startswith("val_"), n == "val_loss"))
            value = float(tfscale.allreduce(np.float64(logs[metric])))
            write(metric=metric, value=value, **read_steps(output.parent))
            raise Done

        report = ours.CommunicationReport(output.parent, every_n_steps=2)
        watch = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: _require_distributed(model.optimizer), on_epoch_end=end
        )
        bound["callbacks"] += [report, watch]
        return fit(**bound | {"initial_epoch": 0, "epochs": epochs})

    with Patches() as patches:
        patches.replace(tfscale.DistributedOptimizer, "__init__", compressed)
        patches.replace(keras.utils, "set_random_seed", lambda _: set_seed(seed))
        set_seed(seed)
        try:
            _run(command, short_fit)
        except ConfigError as error:
            if f"Compression.{name}" not in str(error):
                raise
            write(refused=str(error))


if __name__ == "__main__":
    trial, words = json.loads(sys.argv[1]), sys.argv[2:]
    _run(words, probed_fit(trial)) if "groups" in trial else train_compressed(words, trial)
    if runtime.is_initialized():
        tfscale.shutdown()
