"""One rank of a probe of local SGD: runs a training script for some steps.

Usage: python -m tfscale.measure.groups_probe SETTINGS script.py ...; settings are JSON, see
`tfscale.measure.groups`.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfscale
from tfscale.callbacks.local_models import LocalModels
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.continued_epoch import steps_until
from tfscale.fit.unsynchronised import unites_groups
from tfscale.internals.optimizers import update_rule
from tfscale.measure.script import FILES_AND_STOPS, RATES_AND_SIZES, arguments_of, as_main


class _StepsDone(Exception):
    """The probe is long enough."""


class GroupsProbe(tfscale.callbacks.Callback):
    """Ends a `fit` after some steps and writes the distances.

    Args:
        settings: "groups", "interval", "steps" and "output".
        record: Has the distances.
    """

    def __init__(self, settings: dict[str, Any], record: tfscale.callbacks.ModelDistance) -> None:
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
        """Count steps, also several of an execution; behind the last write the result."""
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
        raise _StepsDone


def probe(words: list[str], settings: dict[str, Any]) -> None:
    """Run a script until its first `fit` has made enough steps.

    Args:
        words: The script and its arguments.
        settings: As for `GroupsProbe`, and "rate_rule" and "learning_rate" (or None).

    Raises:
        ConfigError: It trains without a DistributedOptimizer.
    """
    with as_main(words), mock.patch.object(keras.Model, "fit", probed_fit(settings)):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except _StepsDone:
            tfscale.shutdown()


def probed_fit(settings: dict[str, Any]) -> Callable[..., Any]:
    """Return what takes the place of Keras's `fit`; it ends with an exception of its own.

    Args:
        settings: As for `probe`.
    """
    fit = keras.Model.fit

    def run(model: Any, *args: Any, **options: Any) -> Any:
        _regroup(model, settings)
        left_out = FILES_AND_STOPS + RATES_AND_SIZES
        given = arguments_of(fit, (model, *args), options, left_out)
        enlarge(given.get("x"), settings["groups"])
        record = tfscale.callbacks.ModelDistance()
        # A script without groups need not unite any; two that do would lose the groups' models.
        unite = [] if unites_groups(given["callbacks"]) else [LocalModels()]
        given["callbacks"] += [*unite, record, GroupsProbe(settings, record)]
        return fit(**given | {"epochs": 10**6})

    return run


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


def enlarge(data: Any, groups: int) -> None:
    """Give each group the batches that the script has for all ranks, as [L] does.

    Args:
        data: What `fit` trains on; only `GlobalBatches` is changed.
        groups: How many there are, with a rank each.
    """
    if isinstance(data, tfscale.data.GlobalBatches):
        data.batch_size *= groups


if __name__ == "__main__":
    probe(sys.argv[2:], json.loads(sys.argv[1]))
