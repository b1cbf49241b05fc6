"""Dense layers whose ranks exchange activations and errors instead of weight gradients.

The gradient of a dense kernel is A^T E, the layer's inputs times the errors of its outputs, summed
over the samples. When every rank has the A and E of the whole batch it computes the whole gradient
itself: (n_in + n_out) values per sample travel instead of n_in * n_out in all.

Source: [T] chapter 3, "replicated gradients".
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfscale import runtime
from tfscale.backends.base import Call, Group
from tfscale.errors import PlanError
from tfscale.exchange.base import GradientOptions
from tfscale.process_sets import ProcessSet
from tfscale.reduce_ops import Average

_STREAM = "activations"  # never waits for gradients, nor they for it


def why_not(layer: keras.layers.Layer) -> str:
    """Return why a layer cannot exchange activations and errors, or an empty string.

    Args:
        layer: Any layer.
    """
    if type(layer) is not keras.layers.Dense:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if not layer.trainable:
        return "it is frozen"
    if layer.kernel_regularizer is not None or layer.bias_regularizer is not None:
        return "a regularizer reads its weights"
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return "it is quantized or has LoRA weights"
    return ""


class ReplicatedCall:
    """Stands in for a Dense layer's `call`: gathers activations, later errors.

    Only calls with training=True inside of a traced function exchange anything; evaluation never
    does. The gradient it hands to TensorFlow is that of the whole batch already.
    """

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
        if not training or tf.executing_eagerly() or group.size == 1 or group.rank < 0:
            _note(layer, "plain")
            return self._original(layer, inputs, training=training)
        weights = [tf.convert_to_tensor(v) for v in (layer.kernel, layer.bias) if v is not None]
        outputs = self._multiply(layer, group, tf.convert_to_tensor(inputs), weights)
        return outputs if layer.activation is None else layer.activation(outputs)

    def _multiply(
        self, layer: keras.layers.Dense, group: Group, inputs: tf.Tensor, weights: list[tf.Tensor]
    ) -> tf.Tensor:
        factor = 1.0 / group.size if self._options.op == Average else 1.0

        @tf.custom_gradient
        def multiply(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> Any:
            gathered = self._gather(layer, group, x, "activations")
            outputs = tf.matmul(x, kernel)

            def gradient(error: tf.Tensor) -> list[tf.Tensor]:
                errors = self._gather(layer, group, error, "errors")
                scale = tf.constant(factor, errors.dtype)
                of_kernel = tf.matmul(gathered, errors, transpose_a=True) * scale
                of_bias = [tf.reduce_sum(errors, axis=0) * scale] if bias else []
                _note(layer, "replicated")
                return [tf.matmul(error, kernel, transpose_b=True), of_kernel, *of_bias]

            return tf.nn.bias_add(outputs, bias[0]) if bias else outputs, gradient

        return multiply(inputs, *weights)

    def _gather(
        self, layer: keras.layers.Dense, group: Group, tensor: tf.Tensor, what: str
    ) -> tf.Tensor:
        """Return the rows of all ranks as a matrix."""
        width = tensor.shape[-1]
        packed, context = self._options.compression.compress(tf.reshape(tensor, [-1, width]))
        call = Call(group, f"{layer.path} {what}", (layer.kernel.handle,), _STREAM)
        rows, _ = runtime.backend().allgather(packed, call)
        rows = tf.ensure_shape(rows, [None, width])
        return self._options.compression.decompress(rows, context)


_uses: weakref.WeakKeyDictionary[tf.Graph, dict[int, set[str]]] = weakref.WeakKeyDictionary()


def _note(layer: keras.layers.Dense, use: str) -> None:
    """Remember how a function being traced uses a layer's weights."""
    if tf.executing_eagerly():
        return
    uses = _uses.setdefault(tf.compat.v1.get_default_graph(), {})
    for variable in (layer.kernel, layer.bias):
        if variable is not None:
            uses.setdefault(id(variable), set()).add(use)


def is_whole(variable: Any) -> bool:
    """Return whether the gradient of a variable is that of the whole batch already.

    Args:
        variable: A variable whose gradient the function being traced has computed.

    Raises:
        PlanError: The function uses the layer in training and otherwise, so that parts of the
            gradient are the whole batch's and parts this rank's.
    """
    if tf.executing_eagerly():
        return False
    uses = _uses.get(tf.compat.v1.get_default_graph(), {}).get(id(variable), set())
    if uses == {"plain", "replicated"}:
        raise PlanError(
            "A layer that exchanges activations must be called with training=True wherever its "
            f"gradient is taken. Received: {variable.path} used with training=True and without. "
            "Pass training=True, or set replicated_dense=0."
        )
    return "replicated" in uses


def restore(layer: keras.layers.Layer) -> bool:
    """Give a layer its own `call` back; return whether it had another."""
    if isinstance(vars(layer).get("call"), ReplicatedCall):
        del layer.call
        return True
    return False
