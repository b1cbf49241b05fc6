"""Dense layers that exchange activations and output gradients instead of weight gradients.

The gradient of a dense kernel is A^T E, where A are the layer's inputs and E its output gradients
(errors in [T]), with one row per sample. A rank that has A and E of the whole batch computes the
whole gradient; a rank that has some columns of A and all of E computes the same rows of it.

Source: [T] chapter 3, "replicated gradients"; [T] chapter 4, "partial gradients".
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, raw_variable
from tfscale.comm.runtime import Average, ProcessSet
from tfscale.config import PlanError
from tfscale.exchange.base import DenseKind, DenseLayer, Exchange
from tfscale.exchange.plan import GradientOptions, values_of
from tfscale.internals.keras import layers_of, replace_call, replaced_call, weights_of
from tfscale.internals.trace import (
    context_of,
    current_graph,
    is_stateful,
    outer_graphs,
    runs_once_per_step,
)
from tfscale.plan.segments import row_cuts

logger = logging.getLogger("tfscale")

Use = Literal["plain", "replicated", "partial"]

_STREAM = "activations"  # neither waits for gradients nor delays them
_INNER = "inner"  # used in a function that the traced one calls
_SAME = ("Identity", "IdentityN", "Cast", "CheckNumerics", "StopGradient", "UnsortedSegmentSum")
_SUMS = ("AddN", "AddV2", "Add")
_WORDS = {
    "weights": "weight gradients",
    "replicated": "activations and errors, for whole gradients",
    "partial": "activations and errors, for the gradients of each rank's rows",
}


def shared_weights(model: keras.Model) -> frozenset[int]:
    """Return the `id` of each weight of several layers, or of a layer in TimeDistributed."""
    layers = layers_of(model)
    owners = Counter(id(v) for layer in layers for v in weights_of(layer))
    # TimeDistributed vectorises the layer's call and drops its custom gradient.
    held = [x.layer for x in layers if isinstance(x, keras.layers.TimeDistributed)]
    owners.update(id(v) for layer in held for v in layer.trainable_variables)
    return frozenset(key for key, n in owners.items() if n > 1)


def why_not(layer: keras.layers.Layer, shared: frozenset[int] = frozenset()) -> str:
    """Return why a layer cannot exchange activations, or an empty string.

    `shared` is the result of `shared_weights` for the layer's model.
    """
    if type(layer) is not keras.layers.Dense:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if not layer.trainable:
        return "it is frozen"
    if layer.kernel_regularizer is not None or layer.bias_regularizer is not None:
        return "a regularizer reads its weights"
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return "it is quantized or has LoRA weights"
    if any(id(v) in shared for v in weights_of(layer)):
        return "another layer has its weights too, or vectorises its call"
    return ""


class ReplicatedCall:
    """Replaces a Dense layer's `call`: gathers activations, later output gradients.

    Only calls with training=True in a traced function exchange them, outside of branches and loops.
    The weight gradients that it returns to TensorFlow are already those of the whole batch.
    """

    kernel_use: Use = "replicated"

    def __init__(
        self, layer: keras.layers.Dense, options: GradientOptions, process_set: ProcessSet
    ) -> None:
        self._layer = weakref.ref(layer)
        self._original = type(layer).call
        self._options = options
        self._process_set = process_set
        # Orders this layer's collectives among each other. With the kernel's handle, they would
        # wait for the kernel's gather, and later reads of the kernel for them.
        self._order = tf.Variable(0.0, trainable=False, name="order")

    def belongs_to(self, options: GradientOptions, process_set: ProcessSet) -> bool:
        """Return whether the call was created for these options and ranks."""
        return self._options is options and self._process_set is process_set

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the layer for inputs of shape [samples, ..., n_in]."""
        layer = self._layer()
        assert layer is not None
        group = self._process_set.group()
        if not training or not runs_once_per_step() or group.size == 1 or group.rank < 0:
            self._note(layer, "plain", "plain")
            return self._original(layer, inputs, training=training)
        weights = [tf.convert_to_tensor(v) for v in (layer.kernel, layer.bias) if v is not None]
        outputs = self._multiply(layer, group, tf.convert_to_tensor(inputs), weights)
        return outputs if layer.activation is None else layer.activation(outputs)

    def _multiply(
        self, layer: keras.layers.Dense, group: Group, inputs: tf.Tensor, weights: list[tf.Tensor]
    ) -> tf.Tensor:
        factor = 1.0 / group.size if self._options.op == Average else 1.0
        self._note(layer, self.kernel_use, "replicated")

        @tf.custom_gradient
        def multiply(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> Any:
            sent = self._send(layer, group, x)
            outputs = tf.matmul(x, kernel)

            def gradient(error: tf.Tensor) -> list[Any]:
                errors = self._gather(layer, group, error, "errors")
                errors *= tf.constant(factor, errors.dtype)
                of_kernel = self._kernel_gradient(layer, group, sent, errors)
                of_bias = [tf.reduce_sum(errors, axis=0)] if bias else []
                _note_made(layer, [of_kernel, *of_bias])
                return [tf.matmul(error, kernel, transpose_b=True), of_kernel, *of_bias]

            return tf.nn.bias_add(outputs, bias[0]) if bias else outputs, gradient

        return multiply(inputs, *weights)

    def _send(self, layer: keras.layers.Dense, group: Group, inputs: tf.Tensor) -> tf.Tensor:
        """Return the part of the whole batch's activations that this rank needs."""
        return self._gather(layer, group, inputs, "activations")

    def _kernel_gradient(
        self, layer: keras.layers.Dense, group: Group, sent: tf.Tensor, errors: tf.Tensor
    ) -> Any:
        """Return the gradient from the result of `_send` and the whole batch's output gradients."""
        del layer, group
        return tf.matmul(sent, errors, transpose_a=True)

    def _gather(
        self, layer: keras.layers.Dense, group: Group, tensor: tf.Tensor, what: str
    ) -> tf.Tensor:
        """Return the rows of all ranks as a matrix."""
        width = tensor.shape[-1]
        packed, context = self._options.compression.compress(tf.reshape(tensor, [-1, width]))
        rows, _ = runtime.backend().allgather(packed, self._call(layer, group, what))
        rows = tf.ensure_shape(rows, [None, width])
        return self._options.compression.decompress(rows, context)

    def _call(self, layer: keras.layers.Dense, group: Group, what: str) -> Call:
        return Call(group, f"{layer.path} {what}", (self._order.handle,), _STREAM)

    def _note(self, layer: keras.layers.Dense, kernel: Use, bias: Use) -> None:
        _note_use(layer.kernel, kernel)
        if layer.bias is not None:
            _note_use(layer.bias, bias)


class PartialCall(ReplicatedCall):
    """Replaces a Dense layer's `call`: sends each rank the activations for its rows.

    A rank owns the kernel's rows given by `row_cuts` and receives the same columns of the
    activations of the whole batch. The gradient of the kernel is an IndexedSlices of these rows,
    that of the bias is whole.

    Source: [T] 4.2, eq. 4.8.
    """

    kernel_use: Use = "partial"

    def _send(self, layer: keras.layers.Dense, group: Group, inputs: tf.Tensor) -> tf.Tensor:
        cuts = row_cuts(inputs.shape[-1], group.size)
        n_rows = [end - begin for begin, end in itertools.pairwise(cuts)]
        packed, context = self._options.compression.compress(
            tf.reshape(inputs, [-1, inputs.shape[-1]])
        )
        parts = [tf.reshape(part, [-1]) for part in tf.split(packed, n_rows, axis=1)]
        splits = tf.constant(n_rows, tf.int64) * tf.shape(packed, tf.int64)[0]
        call = self._call(layer, group, "activations")
        received, _ = runtime.backend().alltoall(tf.concat(parts, 0), splits, call)
        columns = tf.reshape(received, [-1, n_rows[group.rank]])
        return self._options.compression.decompress(columns, context)

    def _kernel_gradient(
        self, layer: keras.layers.Dense, group: Group, sent: tf.Tensor, errors: tf.Tensor
    ) -> Any:
        begin, end = row_cuts(layer.kernel.shape[0], group.size)[group.rank :][:2]
        own = tf.matmul(sent, errors, transpose_a=True)
        return tf.IndexedSlices(own, tf.range(begin, end), tf.constant(tuple(layer.kernel.shape)))


def _note_use(variable: Any, use: Use) -> None:
    """Record how the function being traced uses a kernel or bias.

    "plain": its gradient is that of this rank's samples. "replicated": that of the whole batch.
    "partial": that of the whole batch, for this rank's rows only.
    """
    graph = current_graph()
    if graph is None:
        return
    context_of(graph).uses.setdefault(id(variable), set()).add(use)
    for outer in outer_graphs(graph) if use != "plain" else ():
        context_of(outer).uses.setdefault(id(variable), set()).add(_INNER)


def _note_made(layer: keras.layers.Dense, gradients: Sequence[Any]) -> None:
    """Record the gradients that back-propagation through one call of a layer computes."""
    for variable, gradient in zip((layer.kernel, layer.bias), gradients, strict=False):
        values = values_of(gradient)
        context_of(values.graph).made[values.name] = id(variable)


def use_of(variable: Any) -> Use:
    """Return how the function being traced uses a variable whose gradient it has computed.

    Raises:
        PlanError: The function uses the layer both with training=True and without, so that the
            gradient is partly the whole batch's and partly this rank's; or an inner function uses
            the layer, so that the kind of its gradient is unknown.
    """
    graph = current_graph()
    if graph is None:
        return "plain"
    uses = context_of(graph).uses.get(id(variable), set()) or {"plain"}
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


def require_own(gradient: Any, variable: Any, trained: Sequence[Any], is_mean: bool) -> None:
    """Require that a gradient was computed by the calls of the variable's layer alone.

    It may be cast, summed over several calls, and multiplied by a value that is equal on all ranks,
    as it depends on constants and trained variables only. If gradients are averaged, such a value
    may also be added; in a sum over ranks it would be missing all but one time.

    Args:
        gradient: The gradient of a variable whose `use_of` is not "plain".
        variable: A kernel or bias.
        trained: Variables that are equal on all ranks.
        is_mean: Whether gradients are averaged.

    Raises:
        PlanError: The gradient has other contributions.
    """
    graph = current_graph()
    assert graph is not None
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
    """Search from a gradient back to the ops that computed it."""

    def __init__(
        self, graph: tf.Graph, variable: Any, trained: Sequence[Any], is_mean: bool
    ) -> None:
        self._names = {n for n, key in context_of(graph).made.items() if key == id(variable)}
        self._graph, self._trained, self._is_mean = graph, trained, is_mean
        self._handles: set[str] | None = None

    def is_own(self, gradient: tf.Tensor) -> bool:
        """Return whether a gradient comes from the layer's calls alone."""
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
        """Return the inputs that must come from the layer's calls if the tensor does; [] if not.

        Results of these calls depend on messages, so `_is_equal` is False for them.
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
            if not op.inputs or (is_stateful(op) and op.type != "ReadVariableOp"):
                return False
            seen.add(op.name)
            ahead.extend(op.inputs)
        return True


class DenseCalls:
    """The calls of a model's Dense layers, chosen by a strategy.

    They are chosen again whenever a model is prepared, to use facts that were not known before
    `fit`; "auto" keeps the first batch size that it is given.
    """

    def __init__(self) -> None:
        self.is_chosen = False
        # Kernel and bias (or None) of each layer whose kernel must be cut between rows.
        self.rows: list[tuple[Any, Any]] = []
        self._global_batch: int | None = None
        self._said: dict[str, str] = {}

    def choose(
        self,
        model: keras.Model,
        strategy: Exchange,
        options: GradientOptions,
        process_set: ProcessSet,
        is_local: Callable[[Any], bool],
        why_uncut: Callable[[Any], str],
        global_batch: int | None,
    ) -> bool:
        """Choose the exchange of each Dense layer, and replace the layer's `call` accordingly.

        `is_local` returns whether a variable stays on its rank, `why_uncut` why it must not be cut
        (or an empty string).

        Returns:
            Whether the exchange of a layer changed, so that functions must be traced again.
        """
        self._global_batch = strategy.global_batch or self._global_batch or global_batch
        layers = [x for x in layers_of(model) if isinstance(x, keras.layers.Dense)]
        shared = shared_weights(model)
        described = []
        for layer in layers:
            reason = why_not(layer, shared)
            if not reason and any(is_local(v) for v in weights_of(layer)):
                reason = "they are this rank's own"
            described.append(_describe(layer, reason, why_uncut))
        kinds = strategy.dense_kinds(described, process_set.size(), self._global_batch)
        has_changed = False
        for layer, (kind, reason) in zip(layers, kinds, strict=True):
            has_changed |= _set_call(layer, kind, options, process_set)
            if kind != "weights" or reason:
                self._say(layer, f"{_WORDS[kind]}{reason and f': {reason}'}")
        cut = [x for x in layers if isinstance(replaced_call(x), PartialCall)]
        self.rows = [(x.kernel, x.bias) for x in cut]
        self.is_chosen = True
        return has_changed

    def _say(self, layer: keras.layers.Layer, text: str) -> None:
        if self._said.get(layer.path) != text:
            self._said[layer.path] = text
            logger.info("%s exchanges %s.", layer.path, text)


def _describe(
    layer: keras.layers.Dense, reason: str, why_uncut: Callable[[Any], str]
) -> DenseLayer:
    if not layer.built:
        return DenseLayer(layer.path, 0, 0, None, reason)
    config = layer.get_build_config() or {}
    inner = tuple(config.get("input_shape") or (None, None))[1:-1]
    positions = None if None in inner else math.prod(inner)
    n_in, n_out = layer.kernel.shape
    uncut = "" if reason else why_uncut(layer.kernel)
    return DenseLayer(layer.path, n_in, n_out, positions, reason, uncut)


def _set_call(
    layer: keras.layers.Dense, kind: DenseKind, options: GradientOptions, process_set: ProcessSet
) -> bool:
    """Give a layer the call of a kind; return whether its call changed."""
    call, make = replaced_call(layer), _CALLS.get(kind)
    is_kind = isinstance(call, ReplicatedCall) and type(call) is make
    if is_kind and call.belongs_to(options, process_set):
        return False
    has_changed = restore(layer)
    if make is not None:
        replace_call(layer, make(layer, options, process_set))
    return has_changed or make is not None


def restore(layer: keras.layers.Layer) -> bool:
    """Restore a layer's own `call`; return whether it had another."""
    has_another = isinstance(replaced_call(layer), ReplicatedCall)
    if has_another:
        replace_call(layer, None)
    return has_another


_CALLS = {"replicated": ReplicatedCall, "partial": PartialCall}
