"""Read the layer table of a Keras model by tracing it."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.config import ConfigError
from tfscale.internals.keras import built_shape, layers_of, noted_calls
from tfscale.plan.layers import Layer, LayerTable, merge_small

_CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv1D", "DepthwiseConv2D")
_TRANSPOSED = ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")


def find_model(name: str | None, file: str | None) -> keras.Model:
    """Return the model of a "module:function" without arguments, or of a saved file."""
    try:
        if file:
            return keras.models.load_model(file, compile=False)
        module, _, function = str(name).partition(":")
        if os.getcwd() not in sys.path:  # a console script has its own folder there
            sys.path.insert(0, os.getcwd())
        model = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise ConfigError(
            f"model must be a saved file or module:function. Received: {file or name} ({error})."
        ) from error
    if not isinstance(model, keras.Model):
        raise ConfigError(f"{name} must return a Keras model. Received: {type(model).__name__}.")
    return model


def read_layers(model: keras.Model, input_shape: Sequence[int] | None = None) -> LayerTable:
    """Return the layers of a model with their weights and operations per sample.

    The layers are in the order of their calls, each trainable variable in one of them; layers
    without variables are merged into the one before. Operations are those of convolutions and of
    matrix products with weights; other layers, and products of attention without weights, count as
    memory traffic. `input_shape` is that of one sample, for a model of one input with unknown
    dimensions.
    """
    inputs = inputs_of(model, input_shape)
    with noted_calls(_leaves(model)) as calls:
        tf.function(lambda x: model(x, training=True)).get_concrete_function(inputs)
    layers: dict[int, Layer] = {}
    owned = {id(v) for layer, _, _ in calls for v in layer.trainable_variables}
    for layer, before, after in calls:
        made = _layer(layer, before, after)
        if known := layers.get(id(layer)):  # called twice: its weights are shared
            flops, values = known.flops + made.flops, known.values + made.values
            made = Layer(made.name, made.weights, flops, values)
        layers[id(layer)] = made
    loose = [v for v in model.trainable_variables if id(v) not in owned]
    extra = Layer(model.name, tuple((v.path, math.prod(v.shape)) for v in loose))
    of_model = [extra] if loose else []
    return LayerTable(model.name, merge_small((*of_model, *layers.values())))


def inputs_of(model: keras.Model, input_shape: Sequence[int] | None = None) -> Any:
    """Return specs of one sample's inputs, in the structure that the model takes."""
    inputs = getattr(model, "inputs", None)
    if inputs:
        # A Sequential that was never called symbolically has `inputs`, but no `input`.
        structure = inputs[0] if isinstance(model, keras.Sequential) else model.input
    elif model.built and (shape := built_shape(model)):
        structure = keras.KerasTensor(shape, model.compute_dtype)
    elif input_shape is not None:
        structure = keras.KerasTensor((None, *input_shape), model.compute_dtype)
    else:
        raise ConfigError(
            f"{model.name} must be built. Received: a model that does not know its inputs. "
            "Pass --input-shape, or call the model on a batch first."
        )

    def fix(tensor: Any) -> Any:
        shape = tuple(tensor.shape)[1:]
        if input_shape is not None and None in shape:
            shape = tuple(input_shape)
        if None in shape:
            raise ConfigError(
                f"--input-shape must be given. Received: {tensor.shape} as input of "
                f"{model.name}. Pass --input-shape, for example --input-shape 48,48,3."
            )
        return tf.TensorSpec((1, *shape), tensor.dtype)

    return keras.tree.map_structure(fix, structure)


def _leaves(model: keras.Model) -> list[Any]:
    """Return the layers that contain no other layers.

    A recurrent layer counts as one: the number of times its cell is called during tracing is not
    the number of steps of its loop.
    """
    layers = layers_of(model)[1:]
    loops = [x for x in layers if isinstance(x, keras.layers.RNN)]
    cells = {id(cell) for loop in loops for cell in layers_of(loop)[1:]}

    def is_leaf(layer: Any) -> bool:
        return not any(isinstance(x, keras.Layer) for x in layers_of(layer)[1:])

    return [x for x in layers if id(x) not in cells and (x in loops or is_leaf(x))]


def _layer(layer: Any, before: Any, after: Any) -> Layer:
    outputs, inputs = _shapes(after), _shapes(before)
    values = sum(math.prod(shape) for shape in outputs)
    if isinstance(layer, keras.layers.RNN) and not layer.return_sequences:
        values *= inputs[0][0]  # each step writes as many values, even if only the last is used
    weights = tuple((v.path, math.prod(v.shape)) for v in layer.trainable_variables)
    is_dense = type(layer) is keras.layers.Dense and layer.kernel in layer.trainable_variables
    dense = tuple(int(n) for n in layer.kernel.shape) if is_dense else None
    rows = math.prod(outputs[0][:-1]) if is_dense and outputs else 1
    flops = _flops(layer, inputs[0] if inputs else (), outputs[0] if outputs else ())
    return Layer(layer.path or layer.name, weights, flops, values, dense, rows)  # type: ignore[arg-type]


def _shapes(tensors: Any) -> list[tuple[int, ...]]:
    """Return shapes of one sample; dimensions unknown in tracing count as 1."""
    shapes = [t.shape for t in keras.tree.flatten(tensors) if hasattr(t, "shape")]
    return [tuple(1 if n is None else n for n in tuple(shape)[1:]) for shape in shapes]


def _flops(layer: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> float:
    """Return operations per sample: each matrix is applied at each position, time included."""
    name = type(layer).__name__
    # Weights of a recurrent layer include its states, which are matrices too; those of its cell do
    # not.
    cell = getattr(layer, "cell", None)
    owner = cell if isinstance(cell, keras.Layer) else layer
    n_weights = sum(math.prod(v.shape) for v in owner.weights if len(v.shape) > 1)
    if isinstance(layer, keras.layers.Embedding):
        return 0.0
    if isinstance(layer, keras.layers.EinsumDense):
        return 2.0 * math.prod(layer.kernel.shape) * _positions(layer, inputs)
    is_first = getattr(layer, "data_format", None) == "channels_first"
    if name in _CONVOLUTIONS or name in _TRANSPOSED:
        shape = outputs if name in _CONVOLUTIONS else inputs
        return 2.0 * n_weights * math.prod(shape[1:] if is_first else shape[:-1])
    return 2.0 * n_weights * math.prod(inputs[:-1])


def _positions(layer: keras.layers.EinsumDense, inputs: tuple[int, ...]) -> int:
    """Return the number of kernel applications: the product of dimensions the kernel lacks."""
    ours, _, its = layer.equation.partition("->")[0].partition(",")
    sizes = dict(zip(its, layer.kernel.shape, strict=True))
    return math.prod(inputs) // math.prod(n for letter, n in sizes.items() if letter in ours)
