"""What must be equal on the ranks of a `fit`, besides the shapes that collectives compare."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.software import versions
from tfscale.config import ExchangeError
from tfscale.data.keras_pass import argument_of_fit, callbacks_of_fit
from tfscale.fit import adapted_layers, beginnings
from tfscale.model_optimizers import config_of
from tfscale.update.loss_scale import scaled_by

# These set the learning rate of all ranks when training begins.
_LOADING = ("BroadcastGlobalVariablesCallback", "Checkpoint")
_SILENT = ("Callback", "RankZero")  # a rank may have more of these
_HINTS = {
    "tfscale callbacks": "Give fit the same ones in the same order: a callback that talks to other "
    "ranks waits for them. To run a Keras callback on one rank, wrap it in "
    "tfscale.callbacks.RankZero on all of them.",
    "batch size": "Give fit the same batch_size on all ranks, or use tfscale.data.GlobalBatches, "
    "which gives them equal parts of each batch.",
    "vocabularies": "Adapt layers to the same data, or give them one vocabulary, on all ranks.",
    "versions": "Install the same packages on every host.",
}
_NOT_REQUIRED = ("ranks", "first samples", "first weights")
_HINT = "Run the same code with the same settings on every rank."


def describe(model: Any) -> dict[str, Any]:
    """Describe this rank's part of the `fit` that begins.

    Args:
        model: Compiled.

    Returns:
        Texts by topic, in the order of comparison, None if not known yet; "ranks": those that
        train the same model; "first samples": a digest, or "" where the data is elsewhere;
        "first weights": a digest, or "" where another one looks after them.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    callbacks = [c for c in callbacks_of_fit() if _own_class(c)]
    names = {_own_class(c) for c in callbacks}
    is_local = getattr(optimizer, "is_local_var", lambda variable: False)
    weights = [_Variable.of(v) for v in model.weights if not is_local(v)]
    topics = {
        "versions": versions(),
        "tfscale callbacks": [_callback(c) for c in callbacks],
        "model": weights if model.built else None,
        "vocabularies": adapted_layers.vocabularies(model),
        "optimizer": _optimizer(optimizer, names.isdisjoint(_LOADING)),
        "exchange": _exchange(optimizer),
        "batch size": _batch_size(),
        "step": f"run_eagerly={model.run_eagerly}, steps_per_execution={model.steps_per_execution}",
    }
    # These look themselves, if there is nothing to restore.
    restores = any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks_of_fit())
    is_compared = "Checkpoint" not in names and not restores
    return {
        **topics,
        "ranks": beginnings.ranks_of(model),
        "first samples": beginnings.first_samples(),
        "first weights": beginnings.first_weights(model, names) if is_compared else "",
    }


def require_equal(every: Sequence[dict[str, Any]]) -> None:
    """Compare ranks that train the same model; warn where they were given the same samples.

    Args:
        every: What `describe` returned on each rank.

    Raises:
        ExchangeError: Two ranks differ; with the same text on every rank.
    """
    for rank, other in enumerate(every):
        first_rank = other["ranks"][0] if rank in other["ranks"] else rank
        first = every[first_rank]
        if first["ranks"] != other["ranks"]:
            continue
        for topic in [key for key in first if key not in _NOT_REQUIRED]:
            is_known = first[topic] is not None and other[topic] is not None
            if is_known and first[topic] != other[topic]:
                mine, theirs = _difference(first[topic], other[topic])
                raise ExchangeError(
                    f"All ranks must train with the same {topic}. Received: {mine} on rank "
                    f"{first_rank} and {theirs} on rank {rank}. {_HINTS.get(topic, _HINT)}"
                )
    beginnings.warn(every)


def compare_weights(model: Any) -> None:
    """Warn where ranks begin the running `fit` with different weights. Collective."""
    if not runtime.is_single():
        beginnings.compare_weights(model, {_own_class(c) for c in callbacks_of_fit()})


def _own_class(callback: Any) -> str:
    """Return the callback's class of tfscale, if it may talk to other ranks; else ""."""
    ours = [c for c in type(callback).__mro__ if c.__module__.startswith("tfscale.callbacks.")]
    is_ours = any(c.__module__ == "tfscale.callbacks.base" for c in ours)
    return ours[0].__name__ if is_ours and ours[0].__name__ not in _SILENT else ""


def _callback(callback: Any) -> str:
    settings = [f"{n.lstrip('_')}={_text(getattr(callback, n))}" for n in callback.compared]
    return _own_class(callback) + (f"({', '.join(settings)})" if settings else "")


@dataclasses.dataclass(frozen=True)
class _Variable:
    """A weight, equal to another rank's whatever numbers Keras has given to their layers."""

    path: str = dataclasses.field(compare=False)
    kind: str

    @staticmethod
    def of(variable: Any) -> _Variable:
        kind = f"{tuple(variable.shape)} {variable.dtype} trainable={variable.trainable}"
        return _Variable(variable.path, kind)

    def __str__(self) -> str:
        return f"{self.path} {self.kind}"


def _optimizer(optimizer: Any, with_rate: bool) -> dict[str, str]:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return {"class": type(optimizer).__name__}
    own = getattr(optimizer, "__wrapped__", optimizer)
    inner = scaled_by(own)
    config = {k: v for k, v in config_of(own).items() if k != "name"}
    if not with_rate and not isinstance(config.get("learning_rate"), dict):
        config.pop("learning_rate", None)
    texts = {key: json.dumps(value, default=_text) for key, value in config.items()}
    below = {} if inner is None else _optimizer(inner, with_rate)
    # The class that Keras sees: that of what a DistributedOptimizer wraps.
    return {
        "class": optimizer.__class__.__name__,
        **texts,
        **{f"inner {k}": v for k, v in below.items()},
    }


def _exchange(optimizer: Any) -> dict[str, str]:
    reducer = getattr(optimizer, "_self_reducer", None)
    if reducer is None:
        return {"exchange": "none: not a DistributedOptimizer"}
    accumulator, options = optimizer._self_accumulator, reducer.options
    return {
        "exchange": _text(optimizer.strategy),
        "nonfinite": optimizer._self_nonfinite.policy,
        "backward_passes_per_step": str(getattr(accumulator, "passes", 1)),
        "compression": getattr(options.compression, "__name__", type(options.compression).__name__),
        "groups": str(options.num_groups if options.groups is None else len(options.groups)),
        **{key: str(getattr(options, key)) for key in ("op", "predivide", "sparse_as_dense")},
    }


def _text(value: Any) -> str:
    """Return a text that is equal for equal settings, without addresses."""
    if isinstance(value, keras.optimizers.Optimizer):
        return f"{type(value).__name__}({_optimizer(value, True)})"
    if dataclasses.is_dataclass(value):
        fields = (f"{f.name}={_text(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, int | float | str | bool | list | tuple | dict | type(None)):
        return repr(value)
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        with contextlib.suppress(NotImplementedError):  # its class is all that it tells
            return f"{type(value).__name__}({json.dumps(value.get_config(), default=_text)})"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _batch_size() -> str:
    data = argument_of_fit("x")
    if isinstance(data, tf.data.Dataset):
        shapes = [
            spec.shape for spec in tf.nest.flatten(data.element_spec) if hasattr(spec, "shape")
        ]
        first = shapes[0][0] if shapes and shapes[0].rank else None
        return "of a dataset" if first is None else str(first)
    is_array = isinstance(data, np.ndarray | tf.Tensor | list | dict | tuple)
    return str(argument_of_fit("batch_size") or 32) if is_array else f"of {type(data).__name__}"


def _difference(first: Any, other: Any) -> tuple[str, str]:
    """Return what differs first, on either side."""
    for key, mine, theirs in _pairs(first, other):
        if mine != theirs:
            return f"{key}{mine}", f"{key}{theirs}"
    return str(first), str(other)


def _pairs(first: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(first, dict) and isinstance(other, dict):
        for key in {**first, **other}:
            yield f"{key}=", first.get(key, "nothing"), other.get(key, "nothing")
    elif isinstance(first, list) and isinstance(other, list):
        for i in range(max(len(first), len(other))):
            mine = first[i] if i < len(first) else "nothing"
            yield f"number {i}: ", mine, other[i] if i < len(other) else "nothing"
