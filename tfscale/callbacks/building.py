"""Act on a model once its variables exist, and before its first update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfscale.config import ConfigError
from tfscale.data.keras_pass import epochs_of_fit
from tfscale.fit.preparation import share_statistics, wire
from tfscale.internals.optimizers import has_call, is_built, optimizers_of
from tfscale.optimizer.distributed import DistributedOptimizer


def require_built(model: keras.Model) -> None:
    """Require a model whose weights exist, where there is no step that could make them.

    Raises:
        ConfigError: They do not.
    """
    if not is_built(model):
        raise ConfigError(
            "A model must be built where nothing is left to train. Received: "
            f"model={model.name!r} and a checkpoint of the end of training. {how_to_build(model)}"
        )


def how_to_build(model: keras.Model) -> str:
    """Return the advice of an error that says that a model is not built."""
    if not has_call(model):
        return "It has no call(): build its layers, and set model.built = True, before fit."
    way = "Call the model on one batch before fit"
    return f"{way}, or use tfscale.prepare(model, sample_batch=...)."


def when_built(model: keras.Model, action: Callable[[], None]) -> None:
    """Run `action` once model and optimizer are built, and before the first update.

    A model that does not know its shapes yet is built from those of the data that the running
    `fit` was given.

    Args:
        model: A compiled model.
        action: Called without arguments on the main thread, outside of any traced function.

    Raises:
        ConfigError: The shapes of the data do not suffice to build.
    """
    if not is_built(model):
        build_from_data(model)
    build_optimizer(model)
    action()


def build_optimizer(model: keras.Model) -> None:
    """Create the slots of the compiled optimizer, where they do not exist yet."""
    optimizer: Any = getattr(model, "optimizer", None)
    if type(optimizer) is DistributedOptimizer and is_built(model):
        wire(optimizer, model)  # where the layers did not exist yet when the model was prepared
        share_statistics(model)
    is_shared = getattr(optimizer, "shares_state", False) and len(optimizers_of(model)) > 1
    if optimizer is not None and not optimizer.built and not is_shared:
        optimizer.build(model.trainable_variables)


def build_from_data(model: keras.Model) -> None:
    """Build model, losses and metrics from the element spec of the data of the running `fit`.

    Raises:
        ConfigError: The shapes of the data do not suffice.
    """
    # A dataset, whatever Keras calls it.
    build_from_spec(model, lambda: epochs_of_fit()._get_iterator().element_spec)


def build_from_spec(model: keras.Model, spec_of_data: Callable[[], Any]) -> None:
    """Build model, losses and metrics.

    Args:
        model: A compiled model.
        spec_of_data: Returns a batch, or what has the shapes and dtypes of one.

    Raises:
        ConfigError: These do not suffice.
    """
    try:
        model._symbolic_build(data_batch=keras.tree.map_structure(symbol_of, spec_of_data()))
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
