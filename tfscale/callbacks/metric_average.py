"""Metrics over the data of all ranks in the logs of `fit` and `evaluate`."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.base import Callback
from tfscale.checkpoints.variables import metric_states, metrics_of
from tfscale.comm import collectives, objects, runtime
from tfscale.config import ExchangeError
from tfscale.exchange.batch_shares import weight_of_last_batch
from tfscale.fit.session import running_session
from tfscale.internals.keras import give_back_results, replace_results

VALIDATION = "val_"
REDUCE = {"sum": runtime.Sum, "mean": runtime.Average, "max": runtime.Max, "min": runtime.Min}


class MetricAverageCallback(Callback):
    """Put metrics of all ranks' data into `logs`, in place.

    The states of metrics are reduced over ranks and the results recomputed, so that accuracy,
    AUC, precision and loss are those of one process that sees all samples, whatever the number of
    samples per rank. States are summed; a metric whose states must be reduced differently has an
    attribute `tfscale_reduce`, one of `"mean"`, `"max"` and `"min"`. A metric's result may have
    another name in the logs. Numbers that do not come from a metric are averaged, with equal
    weights of the ranks, or under `tfscale.distribute` with those of their rows in the last batch.

    One kind of state is not weighted by samples: the losses of single outputs, which Keras shows
    for models with several outputs, count each batch alike unless its size is known beforehand
    (with `tfscale.data.GlobalBatches` it never is). Their sum, `loss`, is weighted by samples.

    Callbacks that use metrics (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint) and callbacks
    that call `evaluate` themselves must come after it. Within `fit` ranks communicate only when the
    steps of an epoch are over, so one rank may evaluate alone if it keeps the results out of the
    logs. `model.evaluate(..., callbacks=[MetricAverageCallback()])` returns the metrics of all
    ranks.

    Collective: all ranks must pass it, at the same place.

    Args:
        device: Ignored; kept for scripts written for Horovod.

    Raises:
        ExchangeError: At the end of an epoch, on all ranks, if a key is missing on some of them.
    """

    averages_metrics = True
    averages_validation = False  # whether callbacks see the metrics of all ranks in `on_test_end`

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._epoch_logs: dict[str, Any] = {}

    def set_model(self, model: keras.Model) -> None:
        """Begin a `fit`, or an `evaluate` outside of `fit`."""
        super().set_model(model)
        self._is_fitting = False
        give_back_results(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the logs of an earlier `fit`."""
        super().on_train_begin(logs)
        self._epoch_logs = {}
        give_back_results(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the states of the epoch before."""
        super().on_epoch_begin(epoch, logs)
        self._is_fitting = True
        self._snapshots: dict[str, _Snapshot] = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Save the training states; outside of `fit`, replace the results of this `evaluate`."""
        super().on_test_begin(logs)
        if runtime.size() == 1:
            return
        if self._is_fitting:
            # The model resets its metrics next.
            self._snapshots.setdefault("", _Snapshot.of(self.model))
        if not self._is_fitting or self.averages_validation:
            around = running_session()
            if around is None or not around.is_void:  # no rank would answer there
                self._replace_results()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Save the validation states."""
        super().on_test_end(logs)
        if runtime.size() > 1 and self._is_fitting:
            self._snapshots[VALIDATION] = _Snapshot.of(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace this rank's metrics in the logs by those of all ranks together."""
        super().on_epoch_end(epoch, logs)
        self._is_fitting = False
        if runtime.size() == 1 or logs is None:
            return
        if self.is_void:
            logs.update(self._epoch_logs)
            return
        self._snapshots.setdefault("", _Snapshot.of(self.model))
        _average_logs(self.model, logs, self._snapshots)
        self._epoch_logs = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Put the metrics of all ranks into the logs."""
        super().on_train_end(logs)
        if logs is not None:
            # Keras passes the last epoch's logs again, as they were before on_epoch_end.
            logs.update({key: self._epoch_logs.get(key, value) for key, value in logs.items()})

    def _replace_results(self) -> None:
        """Let the running `evaluate` return the results of all ranks."""
        model = self.model

        def of_all_ranks(results: Any) -> dict[str, Any]:
            return metrics_of_all_ranks(model, results)

        replace_results(model, of_all_ranks)


def metrics_of_all_ranks(model: keras.Model, results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a step over the rows of all ranks, given this rank's. Collective."""
    logs = _scalars(results)
    _average_logs(model, logs, {"": _Snapshot.of(model)})
    return logs


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """States and results of a model's metrics at one moment on this rank."""

    states: list[tuple[keras.Variable, str, str]]  # of all metrics: variable, reduction, label
    values: list[np.ndarray]  # of the variables, as float64
    results: dict[str, Any]  # by key of the logs
    stateless: frozenset[str]  # names of metrics without variables
    weight: float  # of this rank's last batch in a mean over ranks

    @classmethod
    def of(cls, model: keras.Model) -> _Snapshot:
        """Copy the states of all metrics of a model; the metrics are left as they are."""
        states = metric_states(model)
        values = [np.asarray(variable.numpy(), np.float64) for variable, _, _ in states]
        stateless = frozenset(m.name for m in metrics_of(model) if not m.variables)
        results = _scalars(model.get_metrics_result())
        return cls(states, values, results, stateless, weight_of_last_batch())

    def reduced_results(self, model: keras.Model) -> dict[str, Any]:
        """Return the results over all ranks' data; the metrics stay as they are. Collective."""
        mapping = []
        for mode, op in REDUCE.items():
            pairs = zip(self.states, self.values, strict=True)
            chosen = [(variable, value) for (variable, used, _), value in pairs if used == mode]
            values = [value for _, value in chosen]
            reduced = collectives.grouped_allreduce(values, op, name=f"tfscale_metrics_{mode}")
            for (variable, _), value in zip(chosen, reduced, strict=True):
                dtype = keras.backend.standardize_dtype(variable.dtype)
                mapping.append((variable, np.asarray(value).astype(dtype)))
        with keras.StatelessScope(state_mapping=mapping):
            return _scalars(model.get_metrics_result())


def _average_logs(
    model: keras.Model, logs: dict[str, Any], snapshots: dict[str, _Snapshot]
) -> None:
    """Replace the values of `logs` by those of all ranks together, in place. Collective.

    A number or array made by metrics is recomputed from their reduced states. Any other number is
    averaged with the weights of the ranks' last batches; other values stay. `snapshots` has
    prefixes of keys as its keys: "" for training, "val_" for validation. Raises on all ranks if a
    key or a metric's state exists on some ranks only.
    """
    for key, value in logs.items():
        if not isinstance(value, (int, float)) and np.ndim(value) == 0 and _is_number(value):
            logs[key] = float(value)  # a NumPy or TensorFlow number, from a callback
    mine = {
        "keys": {key: _kind(key, value, snapshots) for key, value in logs.items()},
        "numbers": {key: value for key, value in logs.items() if isinstance(value, (int, float))},
        "equal": {key: _equal_results(value, snapshots) for key, value in logs.items()},
        "weights": {prefix: taken.weight for prefix, taken in snapshots.items()},
        "states": {f"{p}{label}" for p, taken in snapshots.items() for *_, label in taken.states},
    }
    every = objects.allgather_object(mine, name="metrics of an epoch")
    _require_equal("logs key", [set(item["keys"]) for item in every])
    _require_equal("metric state", [item["states"] for item in every])
    results = {
        prefix + key: value
        for prefix, snapshot in sorted(snapshots.items())
        for key, value in snapshot.reduced_results(model).items()
    }
    for key in logs:
        kinds = {item["keys"][key] for item in every}
        if kinds == {"metric"}:
            logs[key] = results[key]
        elif "other" not in kinds:
            numbers = [item["numbers"][key] for item in every]
            # A train_step may return a metric's result under another name.
            named = set.intersection(*(item["equal"][key] for item in every))
            if named and len(set(numbers)) > 1:
                logs[key] = results[min(named)]
                continue
            prefix = VALIDATION if key.startswith(VALIDATION) and VALIDATION in snapshots else ""
            logs[key] = mean(numbers, [item["weights"][prefix] for item in every])


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or an array of them."""
    return np.asarray(value).dtype.kind in "fiu"


def _kind(key: str, value: Any, snapshots: dict[str, _Snapshot]) -> str:
    """Return the kind of a value of the logs: "metric", "number" or "other"."""
    is_number = isinstance(value, (int, float))
    if not is_number and not (np.ndim(value) and _is_number(value)):
        return "other"
    for prefix, snapshot in snapshots.items():
        name = key.removeprefix(prefix)
        is_stateless = any(name == s or name.endswith(f"_{s}") for s in snapshot.stateless)
        if not key.startswith(prefix) or name not in snapshot.results or is_stateless:
            continue
        # A metric that returns its variable unchanged (keras.metrics.Sum) shows the value of
        # validation under the key of training, as Keras keeps a tensor that shares the buffer.
        if any(_is_close(value, taken.results.get(name)) for taken in snapshots.values()):
            return "metric"
    return "number" if is_number else "other"


def _equal_results(value: Any, snapshots: dict[str, _Snapshot]) -> set[str]:
    """Return the keys of the results of metrics that a number equals."""
    if not isinstance(value, (int, float)):
        return set()
    return {
        prefix + name
        for prefix, taken in snapshots.items()
        for name, result in taken.results.items()
        if name not in taken.stateless and _is_close(value, result)
    }


def _is_close(value: Any, result: Any) -> bool:
    """Return whether a value of the logs equals the result of a metric, up to rounding."""
    if result is None or np.shape(value) != np.shape(result) or not _is_number(result):
        return False
    return bool(np.allclose(value, result, rtol=1e-5, equal_nan=True))


def mean(numbers: list[float], weights: list[float] | None = None) -> float:
    """Return the mean of the ranks' numbers; of equal numbers it is exactly that number.

    The number of a rank with weight 0 need not be finite.
    """
    if all(number == numbers[0] for number in numbers):
        return numbers[0]
    weights = weights or [1.0] * len(numbers)
    counted = [(number, weight) for number, weight in zip(numbers, weights, strict=True) if weight]
    values, factors = np.array(counted, np.float64).T
    return float(np.average(values, weights=factors))


def _require_equal(what: str, names: list[set[str]]) -> None:
    partial = sorted(names[0].union(*names) - names[0].intersection(*names))
    if partial:
        holders = [rank for rank in range(len(names)) if partial[0] in names[rank]]
        raise ExchangeError(
            f"Every {what} must exist on all {runtime.size()} ranks to be averaged. Received: "
            f"{partial[0]!r} on ranks {holders} only. Give every rank the same metrics, "
            "validation data and callbacks, or put callbacks that add keys on one rank after "
            "MetricAverageCallback."
        )


def _scalars(results: dict[str, Any]) -> dict[str, Any]:
    """Convert results as Keras converts logs: nested dicts flattened, numbers as float."""
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, dict):
            flat.update(_scalars(value))
            continue
        array = np.asarray(value)
        flat[key] = float(array) if array.size == 1 else array
    return flat
