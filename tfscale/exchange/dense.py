"""Dense layers whose ranks exchange activations and errors instead of weight gradients.

The gradient of a dense kernel is A^T E, the layer's inputs times the errors of its outputs, summed
over the samples. A rank that has the A and E of the whole batch computes the whole gradient itself,
and one that has some columns of A and all of E the same rows of the gradient.

Source: [T] chapter 3, "replicated gradients"; [T] chapter 4, "partial gradients".
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group
from tfscale.comm.runtime import Average, ProcessSet
from tfscale.exchange.base import GradientOptions
from tfscale.exchange.dense_uses import Use, note
from tfscale.exchange.dense_uses import is_whole as is_whole
from tfscale.exchange.factors import Factors
from tfscale.exchange.provenance import note_call
from tfscale.plan.segments import row_cuts

_STREAM = "activations"  # never waits for gradients, nor they for it


def shared_weights(model: keras.Model) -> frozenset[int]:
    """Return the `id` of each weight of several layers, or of one within TimeDistributed."""
    layers = model._flatten_layers()
    owners = Counter(id(v) for layer in layers for v in own_weights(layer))
    # It vectorises the layer's call, and drops the gradient that goes with it.
    held = [x.layer for x in layers if isinstance(x, keras.layers.TimeDistributed)]
    owners.update(id(v) for layer in held for v in layer.trainable_variables)
    return frozenset(key for key, n in owners.items() if n > 1)


def own_weights(layer: keras.layers.Layer) -> list[Any]:
    """Return the trainable weights of a layer without those of layers inside of it."""
    return list(getattr(layer, "_trainable_variables", ()))


def why_not(layer: keras.layers.Layer, shared: frozenset[int] = frozenset()) -> str:
    """Return why a layer cannot exchange activations and errors, or an empty string.

    Args:
        layer: Any layer.
        shared: What `shared_weights` returns for its model.
    """
    if type(layer) is not keras.layers.Dense:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if not layer.trainable:
        return "it is frozen"
    if layer.kernel_regularizer is not None or layer.bias_regularizer is not None:
        return "a regularizer reads its weights"
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return "it is quantized or has LoRA weights"
    if any(id(v) in shared for v in own_weights(layer)):
        return "another layer has its weights too, or vectorises its call"
    return ""


class ReplicatedCall:
    """Stands in for a Dense layer's `call`: gathers activations, later errors.

    Only calls with training=True inside of a traced function exchange anything, and none in a
    branch or loop of it; evaluation never does. The gradient it hands to TensorFlow is that of the
    whole batch already.
    """

    kernel_use: Use = "replicated"

    def __init__(
        self, layer: keras.layers.Dense, options: GradientOptions, process_set: ProcessSet
    ) -> None:
        """Keep what every call needs.

        Args:
            layer: A layer for which `why_not` has no objection.
            options: How gradients are reduced.
            process_set: Who takes part.
        """
        self._layer = weakref.ref(layer)
        self._original = type(layer).call
        self._options = options
        self._process_set = process_set
        # Orders this layer's collectives among themselves. The kernel would order them behind its
        # own arrival, and later reads of the kernel behind them.
        self._order = tf.Variable(0.0, trainable=False, name="order")

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the layer.

        Args:
            inputs: Shape [samples, ..., n_in].
            training: Whether gradients follow.

        Returns:
            Shape [samples, ..., units].
        """
        layer = self._layer()
        assert layer is not None
        group = self._process_set.group()
        if not training or not _can_exchange() or group.size == 1 or group.rank < 0:
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
                note_call(layer, [of_kernel, *of_bias], Factors(sent, errors))
                return [tf.matmul(error, kernel, transpose_b=True), of_kernel, *of_bias]

            return tf.nn.bias_add(outputs, bias[0]) if bias else outputs, gradient

        return multiply(inputs, *weights)

    def _send(self, layer: keras.layers.Dense, group: Group, inputs: tf.Tensor) -> tf.Tensor:
        """Return the part of the whole batch's activations that this rank needs."""
        return self._gather(layer, group, inputs, "activations")

    def _kernel_gradient(
        self, layer: keras.layers.Dense, group: Group, sent: tf.Tensor, errors: tf.Tensor
    ) -> Any:
        """Return the gradient from what `_send` returned, and the errors of the whole batch."""
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
        note(layer.kernel, kernel)
        if layer.bias is not None:
            note(layer.bias, bias)


class PartialCall(ReplicatedCall):
    """Stands in for a Dense layer's `call`: sends each rank the activations of its rows.

    Rank r owns the kernel's rows from `row_cuts` and receives these columns of the activations of
    the whole batch. The kernel's gradient is an IndexedSlices of its rows; the bias's is whole.

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


def _can_exchange() -> bool:
    """Return whether a collective traced here runs exactly once in each step."""
    if tf.executing_eagerly():
        return False
    return not isinstance(tf.compat.v1.get_default_graph(), ControlFlowFuncGraph)


def own_rows(gradient: Any, n_in: int, group: Group) -> tf.Tensor:
    """Return this rank's rows of a partial gradient.

    Args:
        gradient: IndexedSlices as `PartialCall` makes them, or a sum of several for a layer that
            is called more than once; or a tensor of the kernel's shape.
        n_in: Rows of the kernel.
        group: Who shares them.

    Returns:
        Shape [own rows, n_out].
    """
    begin, end = row_cuts(n_in, group.size)[group.rank :][:2]
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient[begin:end]
    if gradient.values.shape[0] == end - begin:
        return gradient.values
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices - begin, end - begin)


def cut_by_rows(model: keras.Model) -> list[tuple[Any, Any]]:
    """Return kernel and bias (or None) of each layer that makes partial gradients."""
    layers = [x for x in model._flatten_layers() if isinstance(vars(x).get("call"), PartialCall)]
    return [(layer.kernel, layer.bias) for layer in layers]


def replicated_layers(model: keras.Model) -> list[keras.layers.Dense]:
    """Return the layers of which every rank computes the gradient of the whole batch."""
    layers = model._flatten_layers()
    return [x for x in layers if type(vars(x).get("call")) is ReplicatedCall]


def restore(layer: keras.layers.Layer) -> bool:
    """Give a layer its own `call` back; return whether it had another."""
    if isinstance(vars(layer).get("call"), ReplicatedCall):
        del layer.call
        return True
    return False
