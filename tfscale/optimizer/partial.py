"""PartialDistributedOptimizer and its tape: some layers stay local to each rank."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.optimizer.distributed import DistributedOptimizer
from tfscale.optimizer.tape import DistributedGradientTape


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, *args: Any, local_layers: Any = None, **options: Any
) -> DistributedOptimizer:
    """Wrap an optimizer; the variables of some layers stay local to each rank.

    Args:
        optimizer: Any Keras optimizer.
        *args: As for `DistributedOptimizer`.
        local_layers: A layer or a list of layers whose gradients are not exchanged.
        **options: As for `DistributedOptimizer`.

    Returns:
        The wrapped optimizer.

    Raises:
        ConfigError: `local_layers` holds something else than Keras layers.
    """
    layers = _layers_of(local_layers, "optimizer.register_local_var")
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    wrapped.executor.keep_local(layers=layers)
    return wrapped


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **options: Any
) -> DistributedGradientTape:
    """Wrap a tape; the gradients of some layers stay local to each rank.

    Args:
        gradtape: The tape, before or after its `with` block.
        *args: As for `DistributedGradientTape`.
        local_layers: A built layer or a list of built layers whose gradients are not exchanged.
        **options: As for `DistributedGradientTape`.

    Returns:
        The wrapped tape.

    Raises:
        ConfigError: `local_layers` holds something else than built Keras layers.
    """
    layers = _layers_of(local_layers, "tape.register_local_source")
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ConfigError(
            "local_layers of a tape must be built: it leaves their variables alone. Received: "
            f"{', '.join(unbuilt)}, not built. Call the model on a batch first."
        )
    wrapped = DistributedGradientTape(gradtape, *args, **options)
    for layer in layers:
        for variable in layer.trainable_variables:
            wrapped.register_local_source(variable)
    return wrapped


def _layers_of(local_layers: Any, instead: str) -> list[keras.layers.Layer]:
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or []
    wrong = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
    if wrong:
        raise ConfigError(
            f"local_layers must be Keras layers. Received: {type(wrong[0]).__name__}. "
            f"For single variables use {instead}(variable)."
        )
    return list(layers)
