"""Metrics over the data of all ranks in the logs of `fit` and `evaluate`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.base import Callback
from tfscale.checkpoints.variables import metric_states
from tfscale.comm import collectives, objects, runtime
from tfscale.exchange.batch_shares import weight_of_last_batch
from tfscale.fit.metric_updates import Source, flat_items, sources_of, watch
from tfscale.fit.session import running_session
from tfscale.fit.steps import computes_rows
from tfscale.internals.keras import give_back_results, replace_results
from tfscale.internals.traits import Phase

VALIDATION = "val_"
REDUCE = {"sum": runtime.Sum, "mean": runtime.Average, "max": runtime.Max, "min": runtime.Min}
_HINT = (
    "Give every rank the same metrics, validation data and callbacks, or put callbacks that add "
    "keys on one rank after MetricAverageCallback."
)


class MetricAverageCallback(Callback):
    """Put metrics of all ranks' data into `logs`, in place.

    The states of metrics are reduced over ranks and the results recomputed, so that accuracy,
    AUC, precision and loss are those of one process that sees all samples, whatever the number of
    samples per rank. States that an update adds to are summed. Of states that an update compares
    with the largest or smallest of its values the ranks' largest or smallest is taken. A metric of
    your own that changes its states otherwise must have an attribute `tfscale_reduce`: `"sum"`,
    `"mean"`, `"max"`, `"min"`, or a dict of these by names of variables. A `train_step` may return
    `metric.result()` under another name. Numbers that are no metric's result, such as a result that
    the step has changed, are averaged, with equal weights of the ranks, or under
    `tfscale.distribute` with those of their rows in the last batch.

    One kind of state is not weighted by samples: the losses of single outputs, which Keras shows
    for models with several outputs, count each batch alike unless its size is known beforehand
    (with `tfscale.data.GlobalBatches` it never is). Their sum, `loss`, is weighted by samples.

    Keras's callbacks that use metrics (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint) see those
    of all ranks. Within `fit` ranks communicate only when the steps of an epoch are over, so one
    rank may evaluate alone if it keeps the results out of the logs. `model.evaluate(...,
    callbacks=[MetricAverageCallback()])` returns the metrics of all ranks.

    Collective: all ranks must pass it.

    Args:
        device: Ignored; kept for scripts written for Horovod.

    Raises:
        ConfigError: In the first step, on all ranks, if it cannot be told how the states of a
            metric are reduced; or its `tfscale_reduce` is invalid.
        ExchangeError: At the end of an epoch, on all ranks, if a key is missing on some of them.

    Examples:
        >>> tfscale.init()
        >>> dense = keras.layers.Dense(1, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((3,)), dense])
        >>> model.compile("sgd", "mse", metrics=["mae"])
        >>> data = tfscale.data.GlobalBatches(np.ones((4, 3)), np.full((4, 1), 2.0), batch_size=4)
        >>> average = tfscale.callbacks.MetricAverageCallback()
        >>> model.evaluate(data, callbacks=[average], verbose=0)  # of the samples of all ranks
        [4.0, 2.0]
    """

    phase = Phase.METRICS
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
        watch(model)

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
            self._snapshots.setdefault("", _Snapshot.of(self.model, "train_step"))
        if not self._is_fitting or self.averages_validation:
            around = running_session()
            if around is None or not around.is_void:  # no rank would answer there
                of_all = functools.partial(metrics_of_all_ranks, self.model, step="test_step")
                replace_results(self.model, of_all)  # those that `evaluate` returns

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Save the validation states."""
        super().on_test_end(logs)
        if runtime.size() > 1 and self._is_fitting:
            self._snapshots[VALIDATION] = _Snapshot.of(self.model, "test_step")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace this rank's metrics in the logs by those of all ranks together."""
        super().on_epoch_end(epoch, logs)
        self._is_fitting = False
        if runtime.size() == 1 or logs is None:
            return
        if self.is_void:
            logs.update(self._epoch_logs)
            return
        self._snapshots.setdefault("", _Snapshot.of(self.model, "train_step"))
        _average_logs(logs, self._snapshots)
        self._epoch_logs = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Put the metrics of all ranks into the logs."""
        super().on_train_end(logs)
        if logs is not None:
            # Keras passes the last epoch's logs again, as they were before on_epoch_end.
            logs.update({key: self._epoch_logs.get(key, value) for key, value in logs.items()})


def metrics_of_all_ranks(
    model: keras.Model, results: dict[str, Any], step: str, is_direct: bool = False
) -> dict[str, Any]:
    """Return the results of a step over the rows of all ranks, given this rank's. Collective.

    `is_direct` is for results that are those of the step itself, as of `train_on_batch`.
    """
    logs = _scalars(results)
    _average_logs(logs, {"": _Snapshot.of(model, step, is_direct)})
    return logs


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """States of a model's metrics at one moment on this rank, and what the logs show of them."""

    states: list[tuple[keras.Variable, str, str]]  # of all metrics: variable, reduction, label
    values: list[np.ndarray]  # of the variables, as float64
    sources: dict[str, Source]  # metrics that made values of the logs, by key
    weight: float  # of this rank's last batch in a mean over ranks

    @classmethod
    def of(cls, model: keras.Model, step: str, is_direct: bool = False) -> _Snapshot:
        """Copy the states of all metrics of a model; the metrics are left as they are."""
        states = metric_states(model)
        values = [np.asarray(variable.numpy(), np.float64) for variable, _, _ in states]
        weight = weight_of_last_batch() if computes_rows(model, step) else 1.0
        return cls(states, values, sources_of(model, step, is_direct), weight)

    def reduced_results(self) -> dict[str, Any]:
        """Return results over all ranks' data, by key; the metrics stay as they are. Collective."""
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
            return _scalars({key: _result_of(*source) for key, source in self.sources.items()})


def _result_of(metric: keras.metrics.Metric, part: str | None) -> Any:
    result = metric.result()
    return result if part is None else dict(flat_items(result))[part]


def _average_logs(logs: dict[str, Any], snapshots: dict[str, _Snapshot]) -> None:
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
        "weights": {prefix: taken.weight for prefix, taken in snapshots.items()},
        "states": {f"{p}{label}" for p, taken in snapshots.items() for *_, label in taken.states},
    }
    logs_by_rank = objects.allgather_object(mine, name="metrics of an epoch")
    for what, names in (("Keys of logs", "keys"), ("States of metrics", "states")):
        of_ranks = {rank: set(item[names]) for rank, item in enumerate(logs_by_rank)}
        objects.require_equal_values(of_ranks, what, _HINT)
    results = {
        prefix + key: value
        for prefix, snapshot in sorted(snapshots.items())
        for key, value in snapshot.reduced_results().items()
    }
    for key in logs:
        kinds = {item["keys"][key] for item in logs_by_rank}
        if kinds == {"metric"}:
            logs[key] = results[key]
        elif "other" not in kinds:
            numbers = [item["numbers"][key] for item in logs_by_rank]
            prefix = VALIDATION if key.startswith(VALIDATION) and VALIDATION in snapshots else ""
            logs[key] = mean(numbers, [item["weights"][prefix] for item in logs_by_rank])


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or an array of them."""
    return np.asarray(value).dtype.kind in "fiu"


def _kind(key: str, value: Any, snapshots: dict[str, _Snapshot]) -> str:
    """Return the kind of a value of the logs: "metric", "number" or "other"."""
    if not _is_number(value):
        return "other"
    if any(key == prefix + name for prefix, taken in snapshots.items() for name in taken.sources):
        return "metric"
    return "number" if isinstance(value, (int, float)) else "other"


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


def _scalars(results: dict[str, Any]) -> dict[str, Any]:
    """Convert results as Keras converts logs: nested dicts flattened, numbers as float."""
    flat: dict[str, Any] = {}
    for key, value in flat_items(results):
        array = np.asarray(value)
        flat[key] = float(array) if array.size == 1 else array
    return flat
