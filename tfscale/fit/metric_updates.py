"""Metrics over ranks: what steps do with them, seen while Python runs the steps.

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
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.exchange import batch_shares as shares
from tfscale.internals.keras import raw_variable, replace_methods, replace_step, restore_methods
from tfscale.internals.trace import changes_of, current_graph, probe

REDUCTIONS = ("sum", "mean", "max", "min")  # of metrics' states over ranks
STEPS = ("train_step", "test_step")

# A metric, and the key of its result if the result is a dict.
Source = tuple[keras.metrics.Metric, str | None]
Metrics = list[keras.metrics.Metric]


@dataclass
class _Watch:
    """Observations of the metrics of a model."""

    # By name of the step: the keys that it returns, with the metrics that made the values.
    returned: dict[str, dict[str, Source | None]] = field(default_factory=dict)
    # By `id` of a metric: the metric, and how `update_state` changes each of its variables.
    changes: dict[int, tuple[keras.metrics.Metric, list[str]]] = field(default_factory=dict)


_watches: weakref.WeakKeyDictionary[keras.Model, _Watch] = weakref.WeakKeyDictionary()
_updating: list[Any] = []  # metrics whose `update_state` is running, innermost last


def metrics_of(model: keras.Model) -> Metrics:
    """Return the metrics of a model, including those inside the metric that compile() makes."""
    metrics: Metrics = []
    for metric in model.metrics:
        parts = _parts_of(metric)
        metrics.extend([metric] if parts is None else parts)
    return metrics


def _parts_of(metric: Any) -> Metrics | None:
    """Return the metrics inside the one that compile() makes; None for other metrics."""
    parts = getattr(metric, "metrics", None)
    return parts if isinstance(parts, list) else None


# Steps.


def watch(model: keras.Model) -> None:
    """Wrap a model's steps, once, to record what they return and which states they change."""
    if runtime.size() == 1 or model in _watches:
        return
    _watches[model] = _Watch()
    for name in STEPS:
        replace_step(model, name, _watched(model, name, getattr(model, name)))


def forget(model: keras.Model) -> None:
    """Let the steps of a model be those of its class again, if they were watched."""
    if _watches.pop(model, None) is not None:
        restore_methods(model, *STEPS)


def _watched(model: keras.Model, name: str, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    owner = weakref.ref(model)

    @functools.wraps(step)
    def watched_step(data: Any) -> Any:
        model = owner()
        assert model is not None
        with _observed(model) as made:
            outputs = step(data)
        watch = _watches.get(model)
        if isinstance(outputs, dict) and watch is not None:
            source_of = {key: made.get(id(value)) for key, value in flat_items(outputs)}
            sources = {key: source and source[1:] for key, source in source_of.items()}
            watch.returned[name] = sources
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
    watch = _watches.get(model)
    returned = None if watch is None else watch.returned.get(step)
    is_named = not returned or (returned.keys() == by_name.keys() and not is_direct)
    sources = by_name if is_named else returned or {}
    # The result of a metric without variables is a number like others.
    return {key: source for key, source in sources.items() if source and source[0].variables}


@contextlib.contextmanager
def _observed(model: keras.Model) -> Iterator[dict[int, tuple[Any, keras.metrics.Metric, Any]]]:
    """Record results and updates of a model's metrics within a block.

    Yields:
        By `id` of a value that a metric returned: the value, which lives on, and its source.
    """
    made: dict[int, tuple[Any, keras.metrics.Metric, Any]] = {}
    observed: dict[int, Any] = {}
    watch = _watches.get(model, _Watch())

    def observe(metric: Any) -> None:
        if id(metric) in observed:
            return
        observed[id(metric)] = metric
        parts = _parts_of(metric)
        if parts is None:
            update_state = _checked(watch, metric, metric.update_state)
            replace_methods(metric, result=noting(metric, metric.result), update_state=update_state)
            return
        for part in parts:
            observe(part)
        if not parts:  # it makes its metrics in the first update
            replace_methods(metric, update_state=building(metric, metric.update_state))

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
            restore_methods(metric, "result", "update_state")


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


def _checked(watch: _Watch, metric: Any, update: Any) -> Any:
    @functools.wraps(update)
    def checked_update(*args: Any, **kwargs: Any) -> Any:
        with updating(metric):
            if not _must_look(metric):
                return update(*args, **kwargs)
            if tf.executing_eagerly():
                if id(metric) not in watch.changes:
                    _note(watch, metric, *_look_eagerly(update, args, kwargs))
                return update(*args, **kwargs)
            graph = current_graph()
            assert graph is not None
            first_op = len(graph.get_operations())
            result = update(*args, **kwargs)
            _note(watch, metric, graph, first_op)
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


def _note(watch: _Watch, metric: Any, graph: tf.Graph | None, first_op: int) -> None:
    """Record how an update changes the variables of a metric; raise if that cannot be told."""
    variables = metric.variables
    if graph is None:
        changes = ["other"] * len(variables)
    else:
        changes = changes_of(graph, first_op, [raw_variable(v) for v in variables])
    _, before = watch.changes.get(id(metric), (metric, []))
    if len(before) != len(variables):  # never seen before, or without some of its variables
        before = ["none"] * len(variables)
    both = list(zip(before, changes, strict=True))
    changes = [
        new if old == "none" else old if new in ("none", old) else "other" for old, new in both
    ]
    for variable, change in zip(variables, changes, strict=True):
        if change == "other":
            raise ConfigError(
                f"metric {metric.name!r} may have a state that does not add up over ranks: "
                f"{type(metric).__name__}.update_state assigns values other than sums to the "
                f"variable. Received: variable {variable.name!r}. Set the attribute "
                "tfscale_reduce of the class to 'sum', 'mean', 'max' or 'min', or to a dict of "
                "these by names of variables: see 'Data' in the documentation."
            )
    watch.changes[id(metric)] = metric, changes


def reductions_of(model: keras.Model, metric: keras.metrics.Metric) -> list[str]:
    """Return how the ranks' values of each variable of a model's metric are reduced.

    Raises:
        ConfigError: The metric's attribute `tfscale_reduce` is invalid.
    """
    variables, declared = metric.variables, getattr(metric, "tfscale_reduce", None)
    if declared is None:
        # A variable that no update changes is equal on all ranks.
        _, changes = _watches.get(model, _Watch()).changes.get(id(metric), (metric, []))
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
