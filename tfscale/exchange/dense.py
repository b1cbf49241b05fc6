"""Dense layers that exchange activations and output gradients instead of weight gradients.

The gradient of a dense kernel is A^T E, where A are the layer's inputs and E its output gradients
(errors in [T]), with one row per sample. A rank that has A and E of the whole batch computes the
whole gradient; a rank that has some columns of A and all of E computes the same rows of it.

Source: [T] chapter 3, "replicated gradients"; [T] chapter 4, "partial gradients".
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group
from tfscale.comm.runtime import Average, ProcessSet
from tfscale.config import PlanError
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.base import DenseLayer, Exchange
from tfscale.exchange.plan import GradientOptions, values_of
from tfscale.internals.keras import layers_of, replace_call, replaced_call, weights_of
from tfscale.internals.trace import context_of, current_graph, outer_graphs, runs_once_per_step
from tfscale.plan.buckets import Kind
from tfscale.plan.segments import row_cuts

logger = logging.getLogger("tfscale")

_STREAM = "activations"  # neither waits for gradients nor delays them
_INNER = "inner"  # used in a function that the traced one calls
_SAME = ("Identity", "IdentityN", "Cast", "CheckNumerics", "StopGradient", "UnsortedSegmentSum")
_SUMS = ("AddN", "AddV2", "Add")
_SENT_TENSORS = {
    "weights": "weight gradients",
    "replicated": "activations and output gradients, for whole gradients",
    "partial": "activations and output gradients, for the gradients of each rank's rows",
}


def shared_weights(model: keras.Model) -> frozenset[int]:
    """Return the ids of weights that more than one layer uses, or that are in a TimeDistributed."""
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

    kernel_use: Kind = "replicated"

    def __init__(
        self, layer: keras.layers.Dense, options: GradientOptions, process_set: ProcessSet
    ) -> None:
        self._layer = weakref.ref(layer)
        self._original = type(layer).call
        self.options = options
        self.process_set = process_set
        # Orders this layer's collectives among each other. With the kernel's handle, they would
        # wait for the kernel's gather, and later reads of the kernel for them.
        self._order = tf.Variable(0.0, trainable=False, name="order")

    @property
    def layer(self) -> keras.layers.Dense:
        """The layer whose call this is."""
        layer = self._layer()
        assert layer is not None
        return layer

    @property
    def group(self) -> Group:
        """The ranks that exchange activations."""
        return self.process_set.group()

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the layer for inputs of shape [samples, ..., n_in]."""
        layer, group = self.layer, self.group
        if not training or not runs_once_per_step() or group.size == 1 or group.rank < 0:
            self._note("weights", "weights")
            return self._original(layer, inputs, training=training)
        weights = [tf.convert_to_tensor(v) for v in (layer.kernel, layer.bias) if v is not None]
        outputs = self._multiply(tf.convert_to_tensor(inputs), weights)
        return outputs if layer.activation is None else layer.activation(outputs)

    def _multiply(self, inputs: tf.Tensor, weights: list[tf.Tensor]) -> tf.Tensor:
        factor = 1.0 / self.group.size if self.options.op == Average else 1.0
        self._note(self.kernel_use, "replicated")

        @tf.custom_gradient
        def multiply(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> Any:
            sent = self._send(x)
            outputs = tf.matmul(x, kernel)

            def gradient(local_gradients: tf.Tensor) -> list[Any]:
                output_gradients = self._gather(
                    shares.weighted(local_gradients), "output gradients"
                )
                output_gradients *= tf.constant(factor, output_gradients.dtype)
                of_kernel = self._kernel_gradient(sent, output_gradients)
                of_bias = [tf.reduce_sum(output_gradients, axis=0)] if bias else []
                _note_made(self.layer, [of_kernel, *of_bias])
                return [tf.matmul(local_gradients, kernel, transpose_b=True), of_kernel, *of_bias]

            return tf.nn.bias_add(outputs, bias[0]) if bias else outputs, gradient

        return multiply(inputs, *weights)

    def _send(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return the part of the whole batch's activations that this rank needs."""
        return self._gather(inputs, "activations")

    def _kernel_gradient(self, sent: tf.Tensor, output_gradients: tf.Tensor) -> Any:
        """Return the gradient from the result of `_send` and the whole batch's output gradients."""
        return tf.matmul(sent, output_gradients, transpose_a=True)

    def _gather(self, tensor: tf.Tensor, what: str) -> tf.Tensor:
        """Return the rows of all ranks as a matrix."""
        width = tensor.shape[-1]
        packed, context = self.options.compression.compress(tf.reshape(tensor, [-1, width]))
        rows, _ = runtime.backend().allgather(packed, self._call(what))
        rows = tf.ensure_shape(rows, [None, width])
        return self.options.compression.decompress(rows, context)

    def _call(self, what: str) -> Call:
        return Call(self.group, f"{self.layer.path} {what}", (self._order.handle,), _STREAM)

    def _note(self, kernel: Kind, bias: Kind) -> None:
        _note_use(self.layer.kernel, kernel)
        if self.layer.bias is not None:
            _note_use(self.layer.bias, bias)


class PartialCall(ReplicatedCall):
    """Replaces a Dense layer's `call`: sends each rank the activations for its rows.

    A rank owns the kernel's rows given by `row_cuts` and receives the same columns of the
    activations of the whole batch. The gradient of the kernel is an IndexedSlices of these rows,
    that of the bias is whole.

    Source: [T] 4.2, eq. 4.8.
    """

    kernel_use: Kind = "partial"

    def _send(self, inputs: tf.Tensor) -> tf.Tensor:
        cuts = row_cuts(inputs.shape[-1], self.group.size)
        n_rows = [end - begin for begin, end in itertools.pairwise(cuts)]
        packed, context = self.options.compression.compress(
            tf.reshape(inputs, [-1, inputs.shape[-1]])
        )
        parts = [tf.reshape(part, [-1]) for part in tf.split(packed, n_rows, axis=1)]
        splits = tf.constant(n_rows, tf.int64) * tf.shape(packed, tf.int64)[0]
        call = self._call("activations")
        received, _ = runtime.backend().alltoall(tf.concat(parts, 0), splits, call)
        columns = tf.reshape(received, [-1, n_rows[self.group.rank]])
        return self.options.compression.decompress(columns, context)

    def _kernel_gradient(self, sent: tf.Tensor, output_gradients: tf.Tensor) -> Any:
        shape, group = tuple(self.layer.kernel.shape), self.group
        begin, end = row_cuts(shape[0], group.size)[group.rank :][:2]
        rows = tf.matmul(sent, output_gradients, transpose_a=True)
        return tf.IndexedSlices(rows, tf.range(begin, end), tf.constant(shape))


def _note_use(variable: Any, use: Kind) -> None:
    """Record how the function being traced uses a kernel or bias.

    "weights": its gradient is that of this rank's samples. "replicated": that of the whole batch.
    "partial": that of the whole batch, for this rank's rows only.
    """
    graph = current_graph()
    if graph is None:
        return
    context_of(graph).uses.setdefault(id(variable), set()).add(use)
    for outer in outer_graphs(graph) if use != "weights" else ():
        context_of(outer).uses.setdefault(id(variable), set()).add(_INNER)


def _note_made(layer: keras.layers.Dense, gradients: Sequence[Any]) -> None:
    """Record the gradients that back-propagation through one call of a layer computes."""
    for variable, gradient in zip((layer.kernel, layer.bias), gradients, strict=False):
        values = values_of(gradient)
        context_of(values.graph).made[values.name] = id(variable)


def use_of(variable: Any) -> Kind:
    """Return how the function being traced uses a variable whose gradient it has computed.

    Raises:
        PlanError: The function uses the layer both with training=True and without, so that the
            gradient is partly the whole batch's and partly this rank's; or an inner function uses
            the layer, so that the kind of its gradient is unknown.
    """
    graph = current_graph()
    if graph is None:
        return "weights"
    uses = context_of(graph).uses.get(id(variable), set()) or {"weights"}
    if _INNER in uses or len(uses) > 1:
        inner = f"in a tf.function within {graph.name}; take the decorator off"
        mixed = "with training=True and without; pass training=True wherever its gradient is taken"
        raise PlanError(
            f"{variable.path} exchanges activations: its layer must be called with "
            "training=True, where its gradient is applied. Received: use "
            f"{inner if _INNER in uses else mixed}, or let dense layers exchange weights: "
            "Chunked(replicated_dense=0), Sharded(dense='weights')."
        )
    (use,) = uses
    return use  # type: ignore[return-value]


def require_own(gradient: Any, variable: Any) -> None:
    """Require that a gradient was computed by the calls of the variable's layer alone.

    It may be cast, summed over several calls, and multiplied by constants. `use_of(variable)` is
    not "weights".
    """
    graph = current_graph()
    assert graph is not None
    made = {name for name, key in context_of(graph).made.items() if key == id(variable)}
    seen, ahead = set(made), [values_of(gradient)]
    while ahead:
        tensor = ahead.pop()
        is_of_step = tf.is_symbolic_tensor(tensor) and tensor.graph is graph
        if is_of_step and tensor.name in seen:
            continue
        made_of = _made_of(tensor) if is_of_step else []
        if not made_of:
            raise PlanError(
                f"{variable.path} exchanges activations: its gradient must come from "
                "back-propagation through its layer's calls alone. Received: one to which other "
                "uses of the variable (a tied layer, a penalty on weights) or the train step "
                "(clipping) have contributed. Let dense layers exchange weights: "
                "Chunked(replicated_dense=0), Sharded(dense='weights'); or use the optimizer's "
                "weight_decay, clipnorm or global_clipnorm instead of in the train step."
            )
        seen.add(tensor.name)
        ahead.extend(made_of)


def _made_of(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the inputs that must come from the layer's calls if the tensor does; [] if none."""
    op, inputs = tensor.op, list(tensor.op.inputs)
    if op.type in _SAME:
        return [inputs[tensor.value_index]]
    if op.type in _SUMS:
        return inputs
    if op.type == "ConcatV2":  # values of IndexedSlices; the last input is the axis
        return inputs[:-1]
    if op.type in ("Mul", "RealDiv"):
        rest = [x for x in inputs if not _is_constant(x)]
        return rest if len(rest) == 1 and (op.type == "Mul" or rest[0] is inputs[0]) else []
    return []


def _is_constant(tensor: tf.Tensor) -> bool:
    op = tensor.op
    if op.type == "Const" or not op.inputs or op.op_def.is_stateful:
        return op.type == "Const"
    return all(map(_is_constant, op.inputs))


class DenseCalls:
    """The calls of a model's Dense layers, chosen by a strategy.

    They are chosen again whenever a model is prepared, to use facts that were not known before
    `fit`, and when the batch size changes during `fit`.
    """

    def __init__(self, options: GradientOptions) -> None:
        self._options = options
        self._model: weakref.ref[keras.Model] | None = None
        self.is_chosen = False
        # Kernel and bias (or None) of each layer whose kernel must be cut between rows.
        self.rows: list[tuple[Any, Any]] = []
        self.global_batch: int | None = None  # samples of all ranks together, if known
        self._said: dict[str, str] = {}

    @property
    def model(self) -> keras.Model | None:
        """The model whose layers were chosen last, if it still exists."""
        return None if self._model is None else self._model()

    def choose_none(self, model: keras.Model) -> bool:
        """Let all layers exchange weights; return whether functions must be traced again."""
        self._model = weakref.ref(model)
        return any([restore(layer) for layer in layers_of(model)])

    def choose(
        self,
        model: keras.Model,
        strategy: Exchange,
        process_set: ProcessSet,
        is_local: Callable[[Any], bool],
        why_uncut: Callable[[Any], str],
        global_batch: int | None,
    ) -> bool:
        """Choose the exchange of each Dense layer, and replace the layer's `call` accordingly.

        `is_local` returns whether a variable stays on its rank, `why_uncut` why it must not be cut
        between ranks (or an empty string). Returns whether functions must be traced again.
        """
        self._model = weakref.ref(model)
        self.global_batch = global_batch or self.global_batch
        layers = [x for x in layers_of(model) if isinstance(x, keras.layers.Dense)]
        shared = shared_weights(model)
        described = []
        for layer in layers:
            reason = why_not(layer, shared)
            if not reason and any(is_local(v) for v in weights_of(layer)):
                reason = "they are this rank's own"
            described.append(_describe(layer, reason, why_uncut))
        kinds = strategy.dense_kinds(described, process_set.size(), self.global_batch)
        has_changed = False
        for layer, (kind, reason) in zip(layers, kinds, strict=True):
            has_changed |= _set_call(layer, kind, self._options, process_set)
            text = f"{_SENT_TENSORS[kind]}{reason and f': {reason}'}"
            if (kind != "weights" or reason) and self._said.get(layer.path) != text:
                self._said[layer.path] = text
                logger.info("%s exchanges %s.", layer.path, text)
        cut = [x for x in layers if isinstance(replaced_call(x), PartialCall)]
        self.rows = [(x.kernel, x.bias) for x in cut]
        self.is_chosen = True
        return has_changed


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
    layer: keras.layers.Dense, kind: Kind, options: GradientOptions, process_set: ProcessSet
) -> bool:
    """Give a layer the call of a kind; return whether its call changed."""
    call, make = replaced_call(layer), _CALLS.get(kind)
    is_kind = isinstance(call, ReplicatedCall) and type(call) is make
    if is_kind and call.options is options and call.process_set is process_set:
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


@contextlib.contextmanager
def own_calls(layers: Sequence[keras.layers.Layer]) -> Iterator[None]:
    """Let layers call what they call without an exchange, within a block."""
    replaced = [(x, replaced_call(x)) for x in layers]
    replaced = [(layer, call) for layer, call in replaced if isinstance(call, ReplicatedCall)]
    for layer, _ in replaced:
        replace_call(layer, None)
    try:
        yield
    finally:
        for layer, call in replaced:
            replace_call(layer, call)


_CALLS = {"replicated": ReplicatedCall, "partial": PartialCall}
