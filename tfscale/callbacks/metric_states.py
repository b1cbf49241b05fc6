"""Results of Keras metrics recomputed from states that are reduced over ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from tfscale.checkpoints.state import metric_states, metrics_of
from tfscale.comm import collectives, objects, runtime
from tfscale.config import ExchangeError

REDUCE = {
    "sum": runtime.Sum,
    "mean": runtime.Average,
    "max": runtime.Max,
    "min": runtime.Min,
}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """States and results of a model's metrics at one moment on this rank.

    Attributes:
        variables: State variables of all metrics.
        values: Their values as float64 arrays.
        modes: Per variable, how it is reduced over ranks: a key of `REDUCE`.
        labels: Per variable, metric, name and shape, which must be equal on all ranks.
        results: What the metrics gave, by key of the logs.
        stateless: Names of metrics that hold no state variables.
    """

    variables: list[keras.Variable]
    values: list[np.ndarray]
    modes: list[str]
    labels: list[str]
    results: dict[str, Any]
    stateless: frozenset[str]


def take_snapshot(model: keras.Model) -> Snapshot:
    """Copy the states of all metrics of the model; the metrics are left as they are.

    Args:
        model: A compiled model that has run at least one batch.

    Returns:
        The states, and the results the model makes of them.

    Raises:
        ConfigError: A metric's `tfscale_reduce` is unknown.
    """
    states = metric_states(model)
    variables = [variable for variable, _, _ in states]
    return Snapshot(
        variables=variables,
        values=[np.asarray(variable.numpy(), dtype=np.float64) for variable in variables],
        modes=[mode for _, mode, _ in states],
        labels=[label for _, _, label in states],
        results=scalars(model.get_metrics_result()),
        stateless=frozenset(m.name for m in metrics_of(model) if not m.variables),
    )


def reduce_results(model: keras.Model, snapshot: Snapshot) -> dict[str, Any]:
    """Compute the results of the data of all ranks together.

    Collective: all ranks must call this with snapshots of equal labels, in the same order.

    Args:
        model: The model the snapshot was taken of.
        snapshot: This rank's states.

    Returns:
        Results by key of the logs, equal on all ranks. The metrics are left as they are.
    """
    reduced = _reduce(snapshot)
    values = [
        value.astype(keras.backend.standardize_dtype(variable.dtype))
        for variable, value in zip(snapshot.variables, reduced, strict=True)
    ]
    mapping = list(zip(snapshot.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return scalars(model.get_metrics_result())


def average_logs(model: keras.Model, logs: dict[str, Any], snapshots: dict[str, Snapshot]) -> None:
    """Replace the values of `logs` by those of all ranks together, in place.

    A value made by metrics, a number or an array, is recomputed from their reduced states. Any
    other number is averaged, each rank counting the same; all else is left alone.

    Collective: all ranks must call this, in the same order.

    Args:
        model: The model whose metrics made the logs.
        logs: Numbers by name.
        snapshots: By prefix of the keys ("" for training, "val_" for validation).

    Raises:
        ExchangeError: On all ranks, if a key or a metric's state exists on some ranks only.
    """
    for key, value in logs.items():
        if not isinstance(value, (int, float)) and np.ndim(value) == 0 and _is_number(value):
            logs[key] = float(value)  # of numpy or TensorFlow, from a callback
    mine = {
        "keys": {key: _kind(key, value, snapshots) for key, value in logs.items()},
        "numbers": {key: value for key, value in logs.items() if isinstance(value, (int, float))},
        "states": {prefix: taken.labels for prefix, taken in snapshots.items()},
    }
    every = objects.allgather_object(mine, name="metrics of an epoch")
    _require_equal("logs key", [set(item["keys"]) for item in every])
    _require_equal(
        "metric state",
        [
            {f"{p}{label}" for p, labels in item["states"].items() for label in labels}
            for item in every
        ],
    )
    results: dict[str, Any] = {}
    for prefix, snapshot in sorted(snapshots.items()):
        for key, value in reduce_results(model, snapshot).items():
            results[prefix + key] = value
    for key in logs:
        kinds = {item["keys"][key] for item in every}
        if kinds == {"metric"}:
            logs[key] = results[key]
        elif "other" not in kinds:
            logs[key] = _mean([item["numbers"][key] for item in every])


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number, or an array of them."""
    return np.asarray(value).dtype.kind in "fiu"


def _reduce(snapshot: Snapshot) -> list[np.ndarray]:
    """Reduce all states with one message for each mode in use."""
    reduced = list(snapshot.values)
    for mode, op in REDUCE.items():
        chosen = [index for index, used in enumerate(snapshot.modes) if used == mode]
        if not chosen:
            continue
        packed = np.concatenate([snapshot.values[index].ravel() for index in chosen])
        total = np.asarray(collectives.allreduce(packed, op=op, name=f"tfscale_metrics_{mode}"))
        start = 0
        for index in chosen:
            value = snapshot.values[index]
            reduced[index] = total[start : start + value.size].reshape(value.shape)
            start += value.size
    return reduced


def _kind(key: str, value: Any, snapshots: dict[str, Snapshot]) -> str:
    """Tell where a value comes from: "metric", "number" or "other"."""
    is_number = isinstance(value, (int, float))
    if not is_number and not (np.ndim(value) and _is_number(value)):
        return "other"
    for prefix, snapshot in snapshots.items():
        name = key.removeprefix(prefix)
        is_stateless = any(name == s or name.endswith(f"_{s}") for s in snapshot.stateless)
        if not key.startswith(prefix) or name not in snapshot.results or is_stateless:
            continue
        # A metric that returns its variable unchanged (keras.metrics.Sum) shows the validation's
        # value under the training's key, as Keras keeps a tensor that shares the buffer.
        for result in (taken.results.get(name) for taken in snapshots.values()):
            if _is_close(value, result):
                return "metric"
    return "number" if is_number else "other"


def _is_close(value: Any, result: Any) -> bool:
    """Tell whether a value of the logs is what a metric gave, rounded at most."""
    if result is None or np.shape(value) != np.shape(result) or not _is_number(result):
        return False
    return bool(np.allclose(value, result, rtol=1e-5, equal_nan=True))


def _mean(numbers: list[float]) -> float:
    is_equal = all(number == numbers[0] for number in numbers)
    return numbers[0] if is_equal else float(np.mean(np.asarray(numbers, dtype=np.float64)))


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


def scalars(results: dict[str, Any]) -> dict[str, Any]:
    """Convert results as Keras converts logs: nested dicts flattened, numbers as float."""
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, dict):
            flat.update(scalars(value))
            continue
        array = np.asarray(value)
        flat[key] = float(array) if array.size == 1 else array
    return flat
