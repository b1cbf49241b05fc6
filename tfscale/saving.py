"""Loading a model for further training on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.comm.compression import Compression
from tfscale.optimizer import DistributedOptimizer


def load_model(
    filepath: str,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> keras.Model:
    """Load a saved model and wrap its optimizer again.

    Args:
        filepath: A file that `model.save` wrote, with or without tfscale.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: Other classes and functions by name, as for keras.models.load_model.
        compression: As for `DistributedOptimizer`.
        legacy_opts: Ignored; kept for scripts written for Horovod.
        **options: Further arguments of `DistributedOptimizer`.

    Returns:
        The model, compiled with a distributed optimizer that holds the saved state, or as it was
        saved if it has no optimizer.

    Raises:
        ValueError: Keras cannot load the file.
    """
    del legacy_opts
    objects = {c.__name__: c for c in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:  # one that was saved without has none
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
