"""Whether the gradient of a dense layer that exchanges activations is what its calls have made."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm.backends.base import raw_variable
from tfscale.config import PlanError
from tfscale.exchange.bucketed import values_of
from tfscale.exchange.factors import Factors, note_factors

# Names instead of tensors, which would keep their graph alive; with the id of the variable.
_noted: weakref.WeakKeyDictionary[tf.Graph, dict[str, int]] = weakref.WeakKeyDictionary()

_SAME = ("Identity", "IdentityN", "Cast", "CheckNumerics", "StopGradient", "UnsortedSegmentSum")
_SUMS = ("AddN", "AddV2", "Add")


def note_call(layer: keras.layers.Dense, gradients: Sequence[Any], factors: Factors) -> None:
    """Remember what back-propagation through one call of a layer has made.

    Args:
        layer: The layer.
        gradients: Of the kernel and, if there is one, the bias.
        factors: Of the kernel's gradient; an update can be delayed where that is a whole tensor.
    """
    is_whole = not isinstance(gradients[0], tf.IndexedSlices)
    for i, (variable, gradient) in enumerate(
        zip((layer.kernel, layer.bias), gradients, strict=False)
    ):
        values = values_of(gradient)
        _noted.setdefault(values.graph, {})[values.name] = id(variable)
        if is_whole:
            note_factors(gradient, Factors(None, factors.errors) if i else factors)


def require_own(gradient: Any, variable: Any, trained: Sequence[Any], is_mean: bool) -> None:
    """Raise unless a gradient is what the calls of the variable's layer have made.

    It may be cast, be the sum of those of several calls, and be multiplied by what is equal on all
    ranks: what follows from constants and trained variables alone. Such a term may also be added
    where gradients are averaged; in a sum of all ranks it would have to be there once for each.

    Args:
        gradient: What `apply` was given, for a variable whose `use_of` is not "plain".
        variable: A kernel or bias.
        trained: Variables that are equal on all ranks.
        is_mean: Gradients are averaged.

    Raises:
        PlanError: It is something else.
    """
    graph = tf.compat.v1.get_default_graph()
    if _Walk(graph, variable, trained, is_mean).is_own(values_of(gradient)):
        return
    raise PlanError(
        "The gradient of a layer that exchanges activations must be what back-propagation through "
        f"the layer's own calls has made. Received: for {variable.path}, one to which other uses "
        "of the variable (a tied layer) or the train step (clipping) have contributed. Let dense "
        "layers exchange weights: Chunked(replicated_dense=0), Sharded(dense='weights'); or clip "
        "with the optimizer's own clipnorm or global_clipnorm instead of in the train step."
    )


class _Walk:
    """Follows a gradient back to where it was made."""

    def __init__(
        self, graph: tf.Graph, variable: Any, trained: Sequence[Any], is_mean: bool
    ) -> None:
        self._names = {n for n, key in _noted.get(graph, {}).items() if key == id(variable)}
        self._graph, self._trained, self._is_mean = graph, trained, is_mean
        self._handles: set[str] | None = None

    def is_own(self, gradient: tf.Tensor) -> bool:
        """Return whether all of a gradient comes from the layer's calls."""
        seen, ahead = set(), [gradient]
        while ahead:
            tensor = ahead.pop()
            if not isinstance(tensor, tf.Tensor) or tensor.graph is not self._graph:
                return False
            if tensor.name in self._names or tensor.name in seen:
                continue
            seen.add(tensor.name)
            made_of = self._made_of(tensor)
            if not made_of:
                return False
            ahead.extend(made_of)
        return True

    def _made_of(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return what must come from the layer's calls for a tensor to do so; [] if it cannot.

        What they have made depends on messages, so it never is what `_is_equal` finds.
        """
        op, inputs = tensor.op, list(tensor.op.inputs)
        if op.type in _SAME:
            return [inputs[tensor.value_index]]
        if op.type == "ConcatV2":  # values of IndexedSlices; the last input is the axis
            return inputs[:-1]
        if op.type in _SUMS:
            return [x for x in inputs if not (self._is_mean and self._is_equal(x))]
        if op.type == "RealDiv":
            return inputs[:1] if self._is_equal(inputs[1]) else []
        if op.type == "Mul":
            rest = [x for x in inputs if not self._is_equal(x)]
            return rest if len(rest) == 1 else []
        return []

    def _is_equal(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor follows from constants and trained variables alone."""
        if self._handles is None:
            raw = [raw_variable(v) for v in self._trained]
            handles = [self._graph.capture(v.handle) for v in raw if hasattr(v, "handle")]
            self._handles = {handle.name for handle in handles}
        seen, ahead = set(), [tensor]
        while ahead:
            op = ahead[-1].op
            is_known = ahead.pop().name in self._handles or op.type == "Const"
            if is_known or op.name in seen:
                continue
            if not op.inputs or (op._is_stateful and op.type != "ReadVariableOp"):
                return False
            seen.add(op.name)
            ahead.extend(op.inputs)
        return True
