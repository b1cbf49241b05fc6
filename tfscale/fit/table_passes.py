"""Passes of models with tables: ranks that have no batch left answer the lookups of the others.

Elsewhere `evaluate` and `predict` of a rank send nothing. A model with a `ShardedEmbedding` needs
all ranks there: they begin together, within a time limit, and end when the last one has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfscale.comm.eager import raise_own_errors
from tfscale.fit.session import session_of
from tfscale.internals.keras import is_validation, wrap_once
from tfscale.layers.sharded_embedding import ShardedEmbedding, sharded_embeddings

_PASSES = ("evaluate", "predict")


def join_passes(model: keras.Model) -> None:
    """Let `evaluate` and `predict` of a model with tables run on all ranks together."""
    if sharded_embeddings(model):
        for name in _PASSES:
            wrap_once(model, name, lambda run, name=name: _joined(model, run, f"model.{name}"))


def _joined(model: keras.Model, run: Callable[..., Any], what: str) -> Callable[..., Any]:
    def run_together(*args: Any, **kwargs: Any) -> Any:
        layers, session = sharded_embeddings(model), session_of(model)
        if session is not None and is_validation(kwargs):
            if session.is_void:  # other ranks may have left `fit`
                return {}
            session.end_steps()  # ranks that wait in a step must learn of it
        layers[0].rows.meet(what)
        result = run(*args, **kwargs)
        _answer_all(layers)
        return result

    return run_together


def _answer_all(layers: Sequence[ShardedEmbedding]) -> None:
    """Answer lookups until no rank looks up. Collective.

    A thread for each table, since it is not known in which order, and how often, other ranks look
    up in each.
    """
    errors: list[Exception] = []

    def answer(layer: ShardedEmbedding) -> None:
        try:
            while raise_own_errors(layer.answer):
                pass
        except Exception as error:  # raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=answer, args=(layer,), daemon=True) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
