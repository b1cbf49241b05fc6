"""PartialDistributedOptimizer: some layers stay local to each rank."""

from __future__ import annotations

from typing import Any

import keras

from tfscale.errors import ConfigError
from tfscale.optimizer import DistributedOptimizer


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
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or []
    wrong = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
    if wrong:
        raise ConfigError(
            f"local_layers must be Keras layers. Received: {type(wrong[0]).__name__}. "
            "For single variables use optimizer.register_local_var(variable)."
        )
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    wrapped._self_local_layers.extend(layers)
    return wrapped
