"""How a function being traced uses the weights of dense layers, which decides what is exchanged."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import tensorflow as tf

from tfscale.config import PlanError

Use = Literal["plain", "replicated", "partial"]

_INNER = "inner"  # used in a function that this one calls
_uses: weakref.WeakKeyDictionary[tf.Graph, dict[int, set[str]]] = weakref.WeakKeyDictionary()


def note(variable: Any, use: Use) -> None:
    """Remember how the function that is being traced uses a variable.

    Args:
        variable: A kernel or bias.
        use: "plain": its gradient is this rank's. "replicated": it is that of the whole batch.
            "partial": that too, but of this rank's rows only.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    _uses_of(graph).setdefault(id(variable), set()).add(use)
    if use == "plain":
        return
    outer = getattr(graph, "outer_graph", None)
    while outer is not None:
        _uses_of(outer).setdefault(id(variable), set()).add(_INNER)
        outer = getattr(outer, "outer_graph", None)


def _uses_of(graph: tf.Graph) -> dict[int, set[str]]:
    return _uses.setdefault(graph, {})


def use_of(variable: Any) -> Use:
    """Return how the function that is being traced uses a variable.

    Args:
        variable: A variable whose gradient the function has computed.

    Raises:
        PlanError: The function uses the layer in training and otherwise, so that parts of the
            gradient are the whole batch's and parts this rank's; or it is used in a function that
            this one calls, whose gradient does not tell what it is.
    """
    if tf.executing_eagerly():
        return "plain"
    graph = tf.compat.v1.get_default_graph()
    uses = _uses.get(graph, {}).get(id(variable), set()) or {"plain"}
    if uses == {"plain"}:
        return "plain"
    if _INNER in uses:
        raise PlanError(
            "A layer that exchanges activations must be called in the function that applies its "
            f"gradient. Received: {variable.path} used in a tf.function within {graph.name}. Take "
            "the decorator off, or let dense layers exchange weights: Chunked(replicated_dense=0), "
            "Sharded(dense='weights')."
        )
    if len(uses) > 1:
        raise PlanError(
            "A layer that exchanges activations must be called with training=True wherever its "
            f"gradient is taken. Received: {variable.path} used with training=True and without. "
            "Pass training=True, or let dense layers exchange weights: "
            "Chunked(replicated_dense=0), Sharded(dense='weights')."
        )
    (use,) = uses
    return use  # type: ignore[return-value]


def is_whole(variable: Any) -> bool:
    """Return whether the gradient of a variable is that of the whole batch on every rank.

    Args:
        variable: As for `use_of`.

    Raises:
        PlanError: As `use_of`.
    """
    return use_of(variable) == "replicated"
