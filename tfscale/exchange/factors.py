"""Of which matrices a gradient is the product, so that an update can be delayed to a later step."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import tensorflow as tf


class Factors(NamedTuple):
    """What the gradient of a dense layer's weight is made of.

    Attributes:
        activations: Of the whole batch, shape [rows, n_in]; None for a bias.
        errors: Of the whole batch, scaled as the gradient is, shape [rows, n_out].
    """

    activations: tf.Tensor | None
    errors: tf.Tensor


# Names instead of tensors, which would keep their graph alive.
_names: weakref.WeakKeyDictionary[tf.Graph, dict[str, tuple[str, str]]] = (
    weakref.WeakKeyDictionary()
)


def note_factors(gradient: tf.Tensor, factors: Factors) -> None:
    """Remember what a gradient is made of; all tensors are of the function that is being traced.

    Args:
        gradient: A^T E for a kernel, the sum of the rows of E for a bias.
        factors: A and E.
    """
    a_name = "" if factors.activations is None else factors.activations.name
    _names.setdefault(gradient.graph, {})[gradient.name] = (a_name, factors.errors.name)


def product(factors: Factors) -> tf.Tensor:
    """Return the gradient that factors make."""
    if factors.activations is None:
        return tf.reduce_sum(factors.errors, axis=0)
    return tf.matmul(factors.activations, factors.errors, transpose_a=True)


def factors_of(gradient: Any) -> Factors | None:
    """Return what a gradient is made of, if nothing but one cast has happened to it since.

    Args:
        gradient: What `apply` is given.

    Returns:
        None for gradients that were not noted, that were changed (clipped, added to others), or
        that belong to a function around the one that is being traced.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not isinstance(gradient, tf.Tensor) or gradient.graph != graph:
        return None
    known, n_casts = _names.get(graph, {}), 0
    while gradient.name not in known and gradient.op.type in ("Identity", "Cast"):
        n_casts += gradient.op.type == "Cast"
        gradient = gradient.op.inputs[0]
    if gradient.name not in known or n_casts > 1:
        return None
    a_name, e_name = known[gradient.name]
    activations = graph.get_tensor_by_name(a_name) if a_name else None
    return Factors(activations, graph.get_tensor_by_name(e_name))
