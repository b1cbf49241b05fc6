"""Layers that are adapted to data before training: Normalization and lookup layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfscale.comm import objects
from tfscale.internals.keras import drop_functions, layers_of, lookup_layer, state_of


def refresh_all(model: keras.Model) -> None:
    """Let Normalization layers use the values assigned to their variables. Collective.

    These layers compute with constants, which `adapt` and loading a file derive from the variables.
    Assigning to the variables does not update them, and steps traced before contain the old ones.
    """
    trace_together(model, objects.allgather_object(refresh(model), name="adapted layers"))


def refresh(model: keras.Model) -> bool:
    """Recompute the constants of Normalization layers; return whether any has changed."""
    return any([_refresh(layer) for layer in _normalizations(model)])


def trace_together(model: keras.Model, has_changed: Sequence[bool]) -> None:
    """Drop traced functions on all ranks if any rank's layers have changed.

    Collectives are numbered in the order of tracing, so all ranks must trace again together.
    `has_changed` holds the result of `refresh` on each rank.
    """
    if any(has_changed):
        drop_functions(model, "test_function", "predict_function")
        if model.train_function is not None:  # `fit` may be about to call it
            model.make_train_function(force=True)


def statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of Normalization layers; training steps do not change them."""
    return [v for layer in _normalizations(model) for v in state_of(layer)]


def vocabularies(model: keras.Model) -> list[str]:
    """Return a short text for each vocabulary and each list of bin boundaries of the layers."""
    layers = layers_of(model)
    inner = {id(lookup_layer(layer)) for layer in layers}
    return [_describe(layer) for layer in layers if id(layer) not in inner and _looks_up(layer)]


def _normalizations(model: keras.Model) -> Iterator[Any]:
    for layer in layers_of(model):
        is_adapted = isinstance(layer, keras.layers.Normalization) and layer.input_mean is None
        if is_adapted and layer.built:
            yield layer


def _refresh(layer: Any) -> bool:
    if not hasattr(layer.mean, "numpy"):  # built while something was traced
        layer.finalize_state()
        return True
    before = np.array(layer.mean), np.array(layer.variance)
    layer.finalize_state()
    return not (np.array_equal(before[0], layer.mean) and np.array_equal(before[1], layer.variance))


def _looks_up(layer: Any) -> bool:
    kinds = keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization
    return isinstance(layer, (*kinds, keras.layers.Discretization))


def _describe(layer: Any) -> str:
    if isinstance(layer, keras.layers.Discretization):
        entries = list(layer.bin_boundaries or ())
    else:
        # Not `get_vocabulary`: it requires UTF-8 entries.
        table = (lookup_layer(layer) or layer).lookup_table
        parts = table.export() if int(table.size()) else ()  # an empty table may not exist yet
        entries = sorted(zip(*(part.numpy().tolist() for part in parts), strict=True))
    digest = hashlib.blake2b(repr(entries).encode(), digest_size=4).hexdigest()
    return f"{type(layer).__name__} with {len(entries)} entries ({digest})"
