"""How metrics are combined over ranks: what steps do with them, seen while Python runs the steps.

* Which metric made a result that a step returns. It is the same object: a tensor that
  `metric.result()` returned, under whatever key of the logs.
* How a step changes the states of metrics: whether the states of ranks are added, or their largest
  value is taken. That is read from the traced ops of `update_state`. Metrics for which it cannot be
  told are refused while the first step is traced.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.exchange import batch_shares as shares
from tfscale.internals.keras import raw_variable, replace_step
from tfscale.internals.trace import changes_of, current_graph, probe

REDUCTIONS = ("sum", "mean", "max", "min")  # of metrics' states over ranks
STEPS = ("train_step", "test_step")

# A metric, and the key of its result if the result is a dict.
Source = tuple[keras.metrics.Metric, str | None]
Metrics = list[keras.metrics.Metric]

# By model and name of the step: the keys that it returns, with the metrics that made the values.
_returned: weakref.WeakKeyDictionary[keras.Model, dict[str, dict[str, Source | None]]]
_returned = weakref.WeakKeyDictionary()
# How `update_state` changes each variable of a metric.
_changes: weakref.WeakKeyDictionary[keras.metrics.Metric, list[str]]
_changes = weakref.WeakKeyDictionary()
_updating: list[Any] = []  # metrics whose `update_state` is running, innermost last


def metrics_of(model: keras.Model) -> Metrics:
    """Return the metrics of a model, including those inside the metric that compile() makes."""
    found: Metrics = []
    for metric in model.metrics:
        parts = _parts_of(metric)
        found.extend([metric] if parts is None else parts)
    return found


def _parts_of(metric: Any) -> Metrics | None:
    """Return the metrics inside the one that compile() makes; None for other metrics."""
    parts = getattr(metric, "metrics", None)
    return parts if isinstance(parts, list) else None


# Steps.


def watch(model: keras.Model) -> None:
    """Note what the steps of a model return and change, from now on; once for each model."""
    if runtime.size() == 1 or model in _returned:
        return
    _returned[model] = {}
    for name in STEPS:
        replace_step(model, name, _watched(model, name, getattr(model, name)))


def forget(model: keras.Model) -> None:
    """Let the steps of a model be those of its class again, if they were watched."""
    if _returned.pop(model, None) is not None:
        for name in STEPS:
            vars(model).pop(name, None)


def _watched(model: keras.Model, name: str, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    owner = weakref.ref(model)

    @functools.wraps(step)
    def watched_step(data: Any) -> Any:
        model = owner()
        assert model is not None
        with _observed(model) as made:
            outputs = step(data)
        if isinstance(outputs, dict) and model in _returned:
            sources = {key: made.get(id(value)) for key, value in flat_items(outputs)}
            known = _returned[model].setdefault(name, {})
            known.update({key: source and source[1:] for key, source in sources.items()})
        return outputs

    return watched_step


def flat_items(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of results as Keras shows them: nested dicts are flattened."""
    for key, value in results.items():
        if isinstance(value, dict):
            yield from flat_items(value)
        else:
            yield key, value


def sources_of(model: keras.Model, step: str, is_direct: bool = False) -> dict[str, Source]:
    """Return the metric that made each value of the logs; other keys are left out.

    Keras shows the results of all metrics, by their names, where a step returns these keys.
    `is_direct` is for the values of the step itself, which `train_on_batch` returns.
    """
    by_name: dict[str, Source | None] = {}
    with _observed(model) as made:
        for key, value in flat_items(model.get_metrics_result()):
            by_name[key] = source[1:] if (source := made.get(id(value))) else None
    for metric in metrics_of(model):  # a result that is a number of Python has no identity
        if by_name.get(metric.name, True) is None:
            by_name[metric.name] = metric, None
    returned = _returned.get(model, {}).get(step)
    is_named = not returned or (returned.keys() == by_name.keys() and not is_direct)
    sources = by_name if is_named else returned or {}
    # The result of a metric without variables is a number like others.
    return {key: source for key, source in sources.items() if source and source[0].variables}


@contextlib.contextmanager
def _observed(model: keras.Model) -> Iterator[dict[int, tuple[Any, keras.metrics.Metric, Any]]]:
    """Note results and updates of a model's metrics within a block.

    Yields:
        By `id` of a value that a metric returned: the value, which lives on, and its source.
    """
    made: dict[int, tuple[Any, keras.metrics.Metric, Any]] = {}
    observed: dict[int, Any] = {}

    def observe(metric: Any) -> None:
        if id(metric) in observed:
            return
        observed[id(metric)] = metric
        parts = _parts_of(metric)
        if parts is None:
            vars(metric)["result"] = noting(metric, metric.result)
            vars(metric)["update_state"] = _checked(metric, metric.update_state)
            return
        for part in parts:
            observe(part)
        if not parts:  # it makes its metrics in the first update
            vars(metric)["update_state"] = building(metric, metric.update_state)

    def noting(metric: Any, result: Any) -> Any:
        @functools.wraps(result)
        def noting_result() -> Any:
            value = result()
            items = flat_items(value) if isinstance(value, dict) else [(None, value)]
            for key, item in items:
                if hasattr(item, "shape"):
                    made[id(item)] = item, metric, key
            return value

        return noting_result

    def building(metric: Any, update: Any) -> Any:
        @functools.wraps(update)
        def building_update(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if not metric.built:
                metric.build(y_true, y_pred)
            for part in _parts_of(metric) or ():
                observe(part)
            return update(y_true, y_pred, sample_weight)

        return building_update

    try:
        for metric in model.metrics:
            observe(metric)
        yield made
    finally:
        for metric in observed.values():
            for name in ("result", "update_state"):
                vars(metric).pop(name, None)


# States.


def is_updating() -> bool:
    """Return whether the `update_state` of a metric is running within a step."""
    return bool(_updating)


@contextlib.contextmanager
def updating(metric: Any) -> Iterator[None]:
    """Mark a block as the update of a metric."""
    _updating.append(metric)
    try:
        yield
    finally:
        _updating.pop()


def _checked(metric: Any, update: Any) -> Any:
    @functools.wraps(update)
    def checked_update(*args: Any, **kwargs: Any) -> Any:
        with updating(metric):
            if not _must_look(metric):
                return update(*args, **kwargs)
            if tf.executing_eagerly():
                if metric not in _changes:
                    _note(metric, *_look_eagerly(update, args, kwargs))
                return update(*args, **kwargs)
            graph = current_graph()
            assert graph is not None
            first_op = len(graph.get_operations())
            result = update(*args, **kwargs)
            _note(metric, graph, first_op)
            return result

    return checked_update


def _must_look(metric: Any) -> bool:
    """Return whether it must be seen how a metric changes: Keras's own metrics add."""
    declared = getattr(metric, "tfscale_reduce", None)
    is_keras = type(metric).update_state.__module__.startswith("keras.")
    return declared is None and not is_keras


def _look_eagerly(update: Any, args: Any, kwargs: Any) -> tuple[tf.Graph | None, int]:
    share = shares.current()
    try:
        with shares.entering(None) if share else contextlib.nullcontext():
            return probe(update, args, kwargs), 0
    except Exception:  # of code that only runs eagerly
        return None, 0


def _note(metric: Any, graph: tf.Graph | None, first_op: int) -> None:
    """Note how an update changes the variables of a metric; raise if that cannot be told."""
    variables = metric.variables
    if graph is None:
        changes = ["other"] * len(variables)
    else:
        changes = changes_of(graph, first_op, [raw_variable(v) for v in variables])
    before = _changes.get(metric, ["none"] * len(variables))
    both = list(zip(before, changes, strict=True))
    changes = [
        new if old == "none" else old if new in ("none", old) else "other" for old, new in both
    ]
    for variable, change in zip(variables, changes, strict=True):
        if change == "other":
            raise ConfigError(
                f"Metric {metric.name!r} may have a state that does not add up over ranks: "
                f"{type(metric).__name__}.update_state assigns values other than sums to the "
                f"variable. Received: variable {variable.name!r}. Set the attribute "
                "tfscale_reduce of the class to 'sum', 'mean', 'max' or 'min', or to a dict of "
                "these by names of variables: see docs/data.md."
            )
    _changes[metric] = changes


def reductions_of(metric: keras.metrics.Metric) -> list[str]:
    """Return how the ranks' values of each variable of a metric are reduced.

    Raises:
        ConfigError: The metric's attribute `tfscale_reduce` is invalid.
    """
    variables, declared = metric.variables, getattr(metric, "tfscale_reduce", None)
    if declared is None:
        # A variable that no update changes is equal on all ranks.
        changes = _changes.get(metric, [])
        noted = ["max" if change == "none" else change for change in changes]
        return noted if len(noted) == len(variables) else ["sum"] * len(variables)
    by_name = (
        declared
        if isinstance(declared, dict)
        else dict.fromkeys([variable.name for variable in variables], declared)
    )
    for mode in by_name.values():
        if mode not in REDUCTIONS:
            raise ConfigError(
                f"tfscale_reduce of a metric must be one of {', '.join(map(repr, REDUCTIONS))}. "
                f"Received: {mode!r} for metric {metric.name!r}. Leave it out for states that add."
            )
    return [by_name.get(variable.name, "sum") for variable in variables]
