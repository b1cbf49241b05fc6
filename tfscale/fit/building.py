"""Act on a model once its variables exist, and before its first update."""

from __future__ import annotations

from collections.abc import Callable

import keras

from tfscale.config import ConfigError
from tfscale.fit.preparation import share_statistics, wire
from tfscale.fit.session import session_for
from tfscale.internals.keras import batch_spec_of, build_from_spec, how_to_build
from tfscale.internals.optimizers import is_built, optimizer_of, optimizers_of
from tfscale.optimizer.distributed import DistributedOptimizer, distributed_of


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
    optimizer = optimizer_of(model)
    distributed = distributed_of(optimizer)
    if type(optimizer) is DistributedOptimizer and is_built(model):
        wire(optimizer, model)  # where the layers did not exist yet when the model was prepared
        share_statistics(model)
    is_shared = bool(distributed and distributed.shares_state) and len(optimizers_of(model)) > 1
    if optimizer is not None and not optimizer.built and not is_shared:
        optimizer.build(model.trainable_variables)


def build_from_data(model: keras.Model) -> None:
    """Build model, losses and metrics from the element spec of the data of the running `fit`.

    Raises:
        ConfigError: The shapes of the data do not suffice.
    """
    build_from_spec(model, lambda: batch_spec_of(session_for(model).call.epochs))
