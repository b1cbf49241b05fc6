"""The optimizers of a model, and how model and optimizers are built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from tfscale.config import ConfigError
from tfscale.internals.keras import build_from_batch


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer that holds the update rule, below loss scaling."""
    while isinstance(getattr(optimizer, "inner_optimizer", None), keras.optimizers.Optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def optimizers_of(model: keras.Model) -> list[Any]:
    """List the optimizers of a model, those of a custom train_step included.

    Args:
        model: Any Keras model, compiled or not.

    Returns:
        `model.optimizer` first, then other optimizers that are attributes of the model or in a
        list, tuple or dict among them, in the order of the attributes, which is equal on all ranks.
    """
    unique: dict[int, Any] = {}
    for item in _items([getattr(model, "optimizer", None), *vars(model).values()], set()):
        if isinstance(item, keras.optimizers.Optimizer):
            unique.setdefault(id(unwrap(item)._iterations), item)
    return list(unique.values())


def _items(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield values and those in containers among them; `seen` has the ids of the latter."""
    for value in values:
        if not isinstance(value, (list, tuple, dict)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            yield from _items(value.values() if isinstance(value, dict) else value, seen)


def is_built(model: keras.Model) -> bool:
    """Return whether all weights of a model exist.

    A model without a `call`, as of a GAN with a `train_step` alone, is never called, so Keras never
    counts it as built: its layers tell.
    """
    return all(layer.built or not has_call(layer) for layer in model._flatten_layers())


def has_call(layer: Any) -> bool:
    """Return whether a layer or model can be called."""
    return getattr(type(layer), "call", None) is not keras.Model.call


def how_to_build(model: keras.Model) -> str:
    """Return the advice of an error that says that a model is not built."""
    if not has_call(model):
        return "It has no call(): build its layers, and set model.built = True, before fit."
    way = "Call the model on one batch before fit"
    return f"{way}, or use tfscale.prepare(model, sample_batch=...)."


def build_from_spec(model: keras.Model, spec_of_data: Callable[[], Any]) -> None:
    """Build model, losses and metrics.

    Args:
        model: A compiled model.
        spec_of_data: Returns a batch, or what has the shapes and dtypes of one.

    Raises:
        ConfigError: These do not suffice.
    """
    try:
        build_from_batch(model, keras.tree.map_structure(symbol_of, spec_of_data()))
    except Exception as error:
        raise ConfigError(
            "The model must be built before its first update, and its shapes cannot be told from "
            f"the data. Received: model={model.name!r} and "
            f"{type(error).__name__}: {error}. {how_to_build(model)}"
        ) from error


def symbol_of(spec: Any) -> keras.KerasTensor | None:
    """Return the symbol of an array, or of what has shape and dtype of one; else None."""
    if not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
        return None
    return keras.KerasTensor(tuple(spec.shape), dtype=spec.dtype.name)


def trains_all(model: keras.Model) -> bool:
    """Return whether the one optimizer of a model can be built on all its variables.

    Of several optimizers each is built on its own, in the first step.
    """
    return len(optimizers_of(model)) == 1 and is_built(model)


def sharded_states(model: keras.Model) -> list[Any]:
    """Return the `KeptState` of each optimizer whose state the ranks share."""
    found = [getattr(optimizer, "kept_state", None) for optimizer in optimizers_of(model)]
    return [kept for kept in found if kept is not None]


def accumulating(model: keras.Model | None) -> list[Any]:
    """List the optimizers of a model that add up gradients of several batches."""
    found = [] if model is None else optimizers_of(model)
    return [o for o in found if getattr(o, "_self_accumulator", None) is not None]


def passes_per_update(model: keras.Model) -> int:
    """Return how many batches each optimizer of a model has seen when all have updated something.

    More than 1 with `backward_passes_per_step` or Keras's `gradient_accumulation_steps`.
    """
    passes = [o._self_accumulator.passes for o in accumulating(model)]
    keras_own = [unwrap(o).gradient_accumulation_steps or 1 for o in optimizers_of(model)]
    return max([1, *passes, *keras_own])


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's settings, also where its learning rate cannot be serialized.

    Args:
        optimizer: A Keras optimizer.

    Returns:
        What `get_config` does, without an inner optimizer; of a schedule or a function its class,
        and its settings if it has any: Keras asks for none as long as nothing is saved.
    """
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:  # which would ask its inner one, too
        own = ("name", "initial_scale", "dynamic_growth_steps")
        return {name: getattr(optimizer, name) for name in own}
    rate = vars(optimizer).get("_learning_rate")
    if rate is None or isinstance(rate, keras.Variable) or not callable(rate):
        return dict(optimizer.get_config())
    optimizer.__dict__["_learning_rate"] = np.float32(0)
    try:
        config = dict(optimizer.get_config())
    finally:
        optimizer.__dict__["_learning_rate"] = rate
    shown: dict[str, Any] = {"class_name": getattr(rate, "__name__", type(rate).__name__)}
    # A function has no settings, and a schedule needs none before it is saved: the class is known.
    with contextlib.suppress(AttributeError, NotImplementedError):
        shown["config"] = rate.get_config()
    return config | {"learning_rate": shown}
