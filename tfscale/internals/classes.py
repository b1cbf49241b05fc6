"""Patches of Keras's classes and modules, for `tfscale.distribute`, and the way to undo them.

Private names used here, checked with Keras 3.10 and 3.15: the attributes `train_step`, `test_step`
and `predict_step` of one model; `Model._aggregate_additional_loss`; `BatchNormalization._moments`;
`keras.src.losses.loss.reduce_weighted_values` and `apply_mask`;
`keras.src.losses.losses.LossFunctionWrapper`, its `fn` and `_fn_kwargs`; the functions of
`keras.src.backend.tensorflow.random`; `Model._flatten_metrics_in_order`;
`keras.src.backend.config.keras_home`; `TFDatasetAdapter.get_tf_dataset`. Of TensorFlow 2.18 and
2.21: `tf.train.Checkpoint._write`, and functions of `gen_random_ops`, which `tf.random`,
`tf.image.random_*` and `tf.nn` call.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.config import keras_home
from keras.src.backend.tensorflow import random as keras_random
from keras.src.losses import loss as keras_losses
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.data_adapters import tf_dataset_adapter
from tensorflow.python.ops import gen_random_ops

from tfscale.internals.stack import is_called_by_program

_MISSING = object()
# Draws whose first argument is the shape of the result.
_SHAPED = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")
# Draws of TensorFlow that continue from a state, and those of the same numbers for the same seed.
_STATELESS: dict[str, Callable[..., Any]] = {
    "random_standard_normal": lambda shape, dtype, seed: tf.random.stateless_normal(
        shape, seed, dtype=dtype
    ),
    "truncated_normal": lambda shape, dtype, seed: tf.random.stateless_truncated_normal(
        shape, seed, dtype=dtype
    ),
    "random_uniform": lambda shape, dtype, seed: tf.random.stateless_uniform(
        shape, seed, dtype=dtype
    ),
    "random_uniform_int": lambda shape, least, end, seed: tf.random.stateless_uniform(
        shape, seed, least, end, least.dtype
    ),
    "random_gamma": lambda shape, alpha, seed: tf.random.stateless_gamma(
        tf.concat([shape, tf.shape(alpha)], 0), seed, alpha, dtype=alpha.dtype
    ),
    "random_poisson_v2": lambda shape, rate, dtype, seed: tf.random.stateless_poisson(
        tf.concat([shape, tf.shape(rate)], 0), seed, rate, dtype
    ),
    "multinomial": lambda logits, num_samples, output_dtype, seed: tf.random.stateless_categorical(
        logits, num_samples, seed, output_dtype
    ),
    "random_shuffle": lambda value, seed: tf.random.experimental.stateless_shuffle(value, seed),
}
_WITHOUT_SHAPE = ("multinomial", "random_shuffle")
_OF_GENERATOR = ("normal", "uniform", "truncated_normal", "uniform_full_int")

Around = Callable[..., Any]


def _calling(around: Around, function: Any) -> Any:
    """Return a function that calls `around(function, *arguments)`, under the name of `function`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    return call


class NormalizationByMoments(keras.layers.BatchNormalization):
    """A BatchNormalization whose mean and variance of a batch a method changes."""

    def moments(self, inputs: Any, mask: Any, of_rows: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return mean and variance; `of_rows` are those of the inputs."""
        return of_rows

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return self.moments(inputs, mask, super()._moments(inputs, mask))


class Patches:
    """Replaced attributes of classes and modules; `undo` restores what was there before.

    A function is replaced by one that calls `around`, first with the replaced function, then with
    the arguments of the call. A block (`with Patches() as patches`) undoes at its end.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Around) -> None:
        """Put `around` in place of a function, under the function's name and signature."""
        self.replace(owner, name, _calling(around, getattr(owner, name)))

    def undo(self) -> None:
        """Restore all attributes, the last one first."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def wrap_everywhere(self, function: Any, around: Around) -> None:
        """Wrap a function in all modules that have it under its name."""
        name, wrapped = function.__name__, _calling(around, function)
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType) and vars(module).get(name) is function:
                self.replace(module, name, wrapped)

    def wrap_for_program(self, owner: Any, name: str, around: Around) -> None:
        """Wrap a function for calls of the main program and the modules in its folder only."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_called_by_program():
                return around(function, *args, **kwargs)
            return function(*args, **kwargs)

        self.replace(owner, name, call)

    def wrap_checkpoints(self, around: Around) -> None:
        """Wrap the method (self, file_prefix, options) that writes a `tf.train.Checkpoint`."""
        self.wrap(tf.train.Checkpoint, "_write", around)

    # Places of Keras.

    def wrap_datasets(self, around: Around) -> None:
        """Wrap the method that gives a `tf.data.Dataset` to the loop of `fit` and the like."""
        self.wrap(tf_dataset_adapter.TFDatasetAdapter, "get_tf_dataset", around)

    def wrap_model(self, **arounds: Around) -> None:
        """Wrap methods of `keras.Model`, so of all models, by name."""
        vars_of_model = vars(keras.Model)
        if "fit" in vars_of_model:  # a warning of the first `fit` waits there
            del keras.Model.fit
        for name, around in arounds.items():
            self.wrap(keras.Model, name, around)

    def wrap_saves(self, **arounds: Around) -> None:
        """Wrap the functions that save a model, in all modules that have them."""
        modules = {id(m): m for m in (keras.models, keras.saving, tf.keras.models)}
        for module in modules.values():
            for name, around in arounds.items():
                if hasattr(module, name):
                    self.wrap(module, name, around)

    def wrap_moments(self, around: Around) -> None:
        """Wrap the method (self, inputs, mask) with which BatchNormalization sees a batch."""
        self.wrap(keras.layers.BatchNormalization, "_moments", around)

    def wrap_reduction(self, around: Around) -> None:
        """Wrap `reduce_weighted_values`, with which all losses make a number of their values."""
        self.wrap(keras_losses, "reduce_weighted_values", around)

    def wrap_added_losses(self, around: Around) -> None:
        """Wrap the method (self, loss) of models that adds up what `add_loss` was given."""
        self.wrap(keras.Model, "_aggregate_additional_loss", around)

    def wrap_losses(self, around: Around) -> None:
        """Wrap the method (self, y_true, y_pred) of losses made of a function."""
        self.wrap(LossFunctionWrapper, "call", around)

    def wrap_strategies(self, scope: Around, init: Around) -> None:
        """Wrap the scope of strategies of tf.distribute, and the start of those of workers."""
        kinds = tf.distribute
        for kind in (kinds.Strategy, kinds.OneDeviceStrategy):
            self.wrap(kind, "scope", scope)
        for kind in (
            kinds.MultiWorkerMirroredStrategy,
            kinds.experimental.MultiWorkerMirroredStrategy,
        ):
            self.wrap(kind, "__init__", init)

    def wrap_draws(self, shaped: Around, dropout: Around, categorical: Around) -> None:
        """Wrap the draws of random numbers: of a shape, of dropout, and of logits."""
        for name in _SHAPED:
            self.wrap(keras_random, name, shaped)
        for name in _STATELESS.keys() - _WITHOUT_SHAPE:
            self.wrap(gen_random_ops, name, shaped)

        def of_generator(draw: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
            return shaped(functools.partial(draw, generator), *args, **kwargs)

        for name in _OF_GENERATOR:
            self.wrap(tf.random.Generator, name, of_generator)
        self.wrap(keras_random, "dropout", dropout)
        self.wrap(keras_random, "categorical", categorical)
        self.wrap(gen_random_ops, "multinomial", categorical)

    def wrap_stateful_draws(self, around: Around) -> None:
        """Wrap the draws of TensorFlow that continue from a state.

        Before each, `around` is given one that draws the same numbers whenever it gets the same
        `seed`, of two numbers.
        """
        for name, stateless in _STATELESS.items():
            self.wrap(gen_random_ops, name, functools.partial(around, stateless))


def folder_of_downloads(cache_dir: Any) -> Path:
    """Return the folder in which `keras.utils.get_file` keeps its folders."""
    folder = Path(os.path.expanduser(cache_dir or keras_home()))
    if os.access(folder, os.W_OK):
        return folder
    return Path("/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir(), ".keras")


def sums_over_batch(loss: Any) -> bool:
    """Return whether a loss made of a function divides sums over the samples of a batch."""
    if loss.fn not in (keras.losses.dice, keras.losses.tversky):
        return False
    axis = loss._fn_kwargs.get("axis")
    return axis is None or 0 in (axis if isinstance(axis, list | tuple) else [axis])


def weights_with_mask(sample_weight: Any, mask: Any, dtype: Any) -> Any:
    """Return the product of sample weights and mask, of which either may be None, not both."""
    return keras_losses.apply_mask(sample_weight, mask, dtype=dtype, reduction="sum")


def arguments_of(method: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, those with defaults included, without `self`."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    named.pop("self", None)
    named |= named.pop("kwargs", {})
    return named


def metrics_in_order(model: keras.Model, results: dict[str, Any]) -> Any:
    """Return results as `train_on_batch` does: a number, or a list in the order of the metrics."""
    return model._flatten_metrics_in_order(results)
