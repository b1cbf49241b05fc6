"""Private names of Keras and TensorFlow, and the patches of their objects.

All names were checked with Keras 3.10 and 3.15 and TensorFlow 2.18 and 2.21; differences between
these versions are noted where they matter. If a name disappears, only this module breaks.

Of Keras: `Variable._value`, `_path`; `Layer._flatten_layers`, `_trainable_variables`,
`_non_trainable_variables`, `_seed_generators`, `_build_shapes_dict`, `_tracker`,
`_track_variable`, `_untrack_variable`;
`Model._resolve_auto_jit_compile`, `_symbolic_build`, `_initial_epoch`,
`_get_metrics_result_or_logs`, the option `_use_cached_eval_dataset` of `evaluate`;
`TextVectorization._lookup_layer`; `CallbackList._async_train`, `_async_test`, `_async_predict`;
`ModelCheckpoint._save_model`, `_model`, `_should_save_on_batch`, `_last_batch_seen`,
`_batches_seen_since_last_saving`; `EpochIterator._enumerate_iterator`, `_get_iterator`,
`_distributed_dataset`, `_current_iterator`, `_num_batches`, `_steps_seen`;
`PyDatasetAdapter._output_signature`, `_standardize_batch`; `keras.src.utils.io_utils.print_msg`,
`data_adapter_utils.class_weight_to_sample_weights`, `global_state.get_global_attribute`,
`set_global_attribute` with "stateless_scope", `symbolic_scope.in_symbolic_scope`,
`seed_generator.global_seed_generator`, whose attribute has the same name. Of TensorFlow:
`python.eager.record.could_possibly_record`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.utils.io_utils import print_msg
from tensorflow.python.eager.record import could_possibly_record as is_recording

from tfscale.config import ConfigError
from tfscale.internals import stack

T = TypeVar("T")

__all__ = ["class_weight_to_sample_weights", "in_symbolic_scope", "is_recording", "print_msg"]

# Keras 3.10 numbers an execution by its first step, later versions by its first and last steps.
_HAS_LAST_STEP = tuple(int(part) for part in keras.__version__.split(".")[:2]) >= (3, 11)


# Layers and models.


def raw_variable(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable, without waiting for its value."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def device_of(variable: Any) -> str:
    """Return the device of a variable; "" for a tensor that is a source of a tape."""
    return getattr(raw_variable(variable), "device", "") if hasattr(variable, "handle") else ""


def by_device(items: Iterable[T], device: Callable[[T], str]) -> list[list[T]]:
    """Group items by device, order kept: an operation takes the variables of one device only."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(device(item), []).append(item)
    return list(groups.values())


def set_class(variable: keras.Variable, own_class: type) -> None:
    """Turn a variable into one of another class, which keeps its attributes."""
    variable.__class__ = own_class


@contextlib.contextmanager
def making_variables() -> Iterator[None]:
    """Make variables eagerly within a block, also while Keras infers shapes.

    Keras would make them after that: until then they have no values.
    """
    scope = get_global_attribute("stateless_scope")
    set_global_attribute("stateless_scope", None)
    try:
        with tf.init_scope():
            yield
    finally:
        set_global_attribute("stateless_scope", scope)


def put_in_place(layer: Any, before: keras.Variable, value: Any) -> keras.Variable:
    """Return a new weight of a built layer, in place of one whose name and path it gets."""
    variable = keras.Variable(
        lambda shape, dtype: tf.cast(value, dtype),
        shape=value.shape,
        dtype=before.dtype,
        name=before.name,
    )
    variable._path = before.path
    layer._untrack_variable(before)
    was_locked = layer._tracker.locked
    layer._tracker.unlock()
    layer._track_variable(variable)
    if was_locked:
        layer._tracker.lock()
    return variable


def layers_of(model: keras.Model) -> list[Any]:
    """Return a model and all layers inside it, each once."""
    return list(model._flatten_layers())


def weights_of(layer: Any) -> list[keras.Variable]:
    """Return the layer's own weights, including frozen ones, unlike `trainable_variables`."""
    return list(layer._trainable_variables)


def state_of(layer: Any) -> list[keras.Variable]:
    """Return the layer's own non-trainable variables, such as moving statistics."""
    return list(layer._non_trainable_variables)


def seeds_of(layer: Any) -> list[keras.Variable]:
    """Return the states of the layer's own seed generators."""
    return [generator.state for generator in layer._seed_generators]


def has_global_seed() -> bool:
    """Return whether `keras.random` was called without a seed, which makes a generator for that."""
    return get_global_attribute("global_seed_generator") is not None


def global_seed_state() -> keras.Variable:
    """Return the state of the generator for calls of `keras.random` without a seed."""
    return global_seed_generator().state


def built_shape(model: keras.Model) -> Any:
    """Return the shape of the first argument that a model was built with; None if unknown."""
    return next(iter((getattr(model, "_build_shapes_dict", None) or {}).values()), None)


@contextlib.contextmanager
def noted_calls(layers: Sequence[Any]) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Record (layer, inputs, outputs) of each call of some layers within a block."""
    calls: list[tuple[Any, Any, Any]] = []
    before = [(layer, replaced_call(layer)) for layer in layers]

    def watch(layer: Any, call: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            calls.append((layer, args[0] if args else next(iter(kwargs.values()), None), outputs))
            return outputs

        return watched

    for layer in layers:
        replace_call(layer, watch(layer, layer.call))
    try:
        yield calls
    finally:
        for layer, call in before:
            replace_call(layer, call)


def has_call(layer: Any) -> bool:
    """Return whether a layer or model can be called."""
    return getattr(type(layer), "call", None) is not keras.Model.call


def is_built(model: keras.Model) -> bool:
    """Return whether all weights of a model exist.

    A model without a `call`, such as a GAN with only a `train_step`, is never called, so Keras
    never marks it as built; then only its layers are checked.
    """
    return all(layer.built or not has_call(layer) for layer in layers_of(model))


def is_xla_automatic(model: keras.Model) -> bool:
    """Return whether jit_compile="auto", not the user, may switch XLA on for a model."""
    return bool(model._resolve_auto_jit_compile())


def how_to_build(model: keras.Model) -> str:
    """Return the advice for an error about a model that is not built."""
    if not has_call(model):
        return "It has no call(): build its layers, and set model.built = True, before fit."
    way = "Call the model on one batch before fit"
    return f"{way}, or use tfscale.prepare(model, sample_batch=...)."


def build_from_spec(model: keras.Model, spec_of_data: Callable[[], Any]) -> None:
    """Build model, losses and metrics of a compiled model.

    `spec_of_data` returns a batch, or specs with its shapes and dtypes.
    """
    try:
        batch = keras.tree.map_structure(symbol_of, spec_of_data())
        model._symbolic_build(data_batch=batch)
    except Exception as error:
        raise ConfigError(
            "model must be built before its first update: its shapes cannot be told from the "
            f"data. Received: model={model.name!r} and {type(error).__name__}: {error}. "
            f"{how_to_build(model)}"
        ) from error


def symbol_of(spec: Any) -> keras.KerasTensor | None:
    """Return a KerasTensor with the shape and dtype of an array or spec; None for other objects."""
    if not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
        return None
    return keras.KerasTensor(tuple(spec.shape), dtype=spec.dtype.name)


def lookup_layer(layer: Any) -> Any:
    """Return the layer inside a TextVectorization that holds its vocabulary; else None."""
    return getattr(layer, "_lookup_layer", None)


# Patches of a model.


def before_first_fit(act: Callable[[Any, Any], None]) -> None:
    """Call `act` with model and callbacks when `fit` is next called, of whatever model."""
    if "fit" in vars(keras.Model):  # it waits for the first call already
        return
    fit = keras.Model.fit

    @functools.wraps(fit)
    def first_fit(*args: Any, **kwargs: Any) -> Any:
        del keras.Model.fit
        arguments = inspect.signature(fit).bind(*args, **kwargs).arguments
        act(arguments["self"], arguments.get("callbacks"))
        return fit(*args, **kwargs)

    keras.Model.fit = first_fit


def wrap_train_function(model: keras.Model, wrap: Callable[[Any], Any], kind: type) -> None:
    """Wrap all present and later train functions of a model, once each, in a `kind`."""
    if isinstance(model.train_function, kind):
        return
    if model.train_function is not None:
        model.train_function = wrap(model.train_function)
    if "make_train_function" in vars(model):
        return
    make = model.make_train_function

    def make_wrapped(force: bool = False) -> Any:
        make(force=force)
        if not isinstance(model.train_function, kind):
            model.train_function = wrap(model.train_function)
        return model.train_function

    model.make_train_function = make_wrapped


_FUNCTIONS = ("train_function", "test_function", "predict_function")


def drop_functions(model: keras.Model, *names: str) -> None:
    """Let a model trace its functions again: those with some names, or all three."""
    for name in names or _FUNCTIONS:
        setattr(model, name, None)


def stop_training(model: keras.Model, stops: bool = True) -> None:
    """Let `fit` stop after this batch or epoch, or not."""
    model.stop_training = stops


def switch_off_xla(model: keras.Model) -> None:
    """Let a compiled model's functions be compiled without XLA."""
    model.jit_compile = False


def replace_optimizer(model: keras.Model, optimizer: Any, name: str = "optimizer") -> None:
    """Train a compiled model with another optimizer, under one of its names."""
    setattr(model, name, optimizer)


def replace_function(model: keras.Model, name: str, function: Any) -> None:
    """Replace the traced function of a model's steps: its `train_function`, for example."""
    setattr(model, name, function)


def write_to(logger: keras.callbacks.CSVLogger, filename: str) -> None:
    """Let a CSVLogger that has not begun write to another file."""
    logger.filename = filename


def replace_step(model: keras.Model, name: str, step: Callable[[Any], Any]) -> None:
    """Replace a model's `train_step` or `test_step`; a function made before is traced again."""
    model.__dict__[name] = step
    function = name.replace("_step", "_function")
    if getattr(model, function) is not None:  # a `fit` may be using it
        getattr(model, f"make_{function}")(force=True)


def is_validation(options: Mapping[str, Any]) -> bool:
    """Return whether the options of `evaluate` are those with which `fit` validates."""
    return "_use_cached_eval_dataset" in options


def wrap_once(model: keras.Model, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wrap a method of one model (`save`, `save_weights`, `export`), unless already wrapped."""
    if name not in vars(model):
        model.__dict__[name] = wrap(getattr(model, name))


def replace_methods(thing: Any, **methods: Callable[..., Any]) -> None:
    """Replace methods of one model or metric."""
    vars(thing).update(methods)


def restore_methods(thing: Any, *names: str) -> None:
    """Let methods of one model or metric be those of its class again."""
    for name in names:
        vars(thing).pop(name, None)


def wrap_moments_of(layer: keras.layers.Layer, wrap: Callable[[Any], Any]) -> None:
    """Wrap the method (inputs, mask) with which one BatchNormalization sees a batch, once."""
    wrap_once(layer, "_moments", wrap)


def replaced_call(layer: keras.layers.Layer) -> Any:
    """Return the function that `replace_call` set as a layer's `call`, or None."""
    return vars(layer).get("call")


def replace_call(layer: keras.layers.Layer, call: Callable[..., Any] | None) -> None:
    """Replace the `call` of one layer; None restores that of its class."""
    if call is None:
        del layer.call
    else:
        layer.call = call


def begin_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Set the first epoch of this and later `fit`s; None for their argument `initial_epoch`."""
    model._initial_epoch = epoch


def replace_results(model: keras.Model, change: Callable[[Any], Any]) -> None:
    """Apply `change` to the results that the running `evaluate` returns, if there is one.

    Keras gives `on_test_end` a copy of the results, so changes made there would be lost.
    """
    if stack.current_pass().caller != "evaluate":
        return
    original = type(model)._get_metrics_result_or_logs
    running_pass = weakref.ref(stack.running_passes()[0])

    def changed_results(logs: dict[str, Any]) -> Any:
        running = stack.running_passes()
        is_own = bool(running) and running[0] is running_pass()
        if is_own or running_pass() not in running:  # ended or failed; else another runs inside it
            give_back_results(model)
        # Of another `evaluate` nothing is changed: the other ranks may not be running it.
        return change(original(model, logs)) if is_own else original(model, logs)

    model.__dict__["_get_metrics_result_or_logs"] = changed_results


def give_back_results(model: keras.Model) -> None:
    """Undo `replace_results`, also after an `evaluate` that failed."""
    model.__dict__.pop("_get_metrics_result_or_logs", None)


# The callbacks of a `fit`.


def set_callbacks(callback_list: Any, callbacks: list[Any]) -> None:
    """Set the callbacks of a list; new ones get the hooks that come after the present one.

    All hooks then run on the main thread: Keras uses others if the callbacks it was given allow it.
    """
    callback_list.callbacks = callbacks  # a new list: Keras is iterating over the present one
    callback_list._async_train = callback_list._async_test = callback_list._async_predict = False


def wrap_saves(wrap: Callable[[Any], Any]) -> None:
    """Wrap the method `ModelCheckpoint._save_model`, once in a process."""
    plain = keras.callbacks.ModelCheckpoint
    if not hasattr(plain._save_model, "__wrapped__"):
        plain._save_model = wrap(plain._save_model)


class _NeverSaved:
    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    save_weights = save


@contextlib.contextmanager
def writing_nothing(callback: Any) -> Iterator[None]:
    """Let a `ModelCheckpoint` decide and count within a block without writing or printing."""
    before = callback._model, callback.filepath, callback.verbose
    callback._model, callback.verbose = _NeverSaved(), 0
    callback.filepath = os.path.basename(callback.filepath)
    try:
        yield
    finally:
        callback._model, callback.filepath, callback.verbose = before


def batches_of(callback: Any) -> dict[str, int]:
    """Return the batch counters of a `ModelCheckpoint`, for `saves_after`."""
    names = ("_batches_seen_since_last_saving", "_last_batch_seen")
    return {name: getattr(callback, name) for name in names}


def saves_after(point: Any, batch: int) -> bool:
    """Return whether a `ModelCheckpoint` saves after a batch, and count it.

    `point` has `save_freq` and the attributes that `batches_of` returned.
    """
    return bool(keras.callbacks.ModelCheckpoint._should_save_on_batch(point, batch))


# Keras's iterator of epochs, which serves the batches of one `fit`.


def steps_until(model: keras.Model, batch: int, params: Mapping[str, Any] | None = None) -> int:
    """Return the number of steps of an epoch so far, given the batch of `on_train_batch_end`.

    Keras counts the last execution of several steps as a full one. With a callback's `params` the
    number of steps is exact, where Keras knows that of an epoch.
    """
    reached = batch + (1 if _HAS_LAST_STEP else model.steps_per_execution)
    return min(reached, int((params or {}).get("steps") or reached))


def batch_spec_of(epochs: Any) -> Any:
    """Return the element spec of the dataset that serves the batches."""
    return epochs._get_iterator().element_spec


def serve_again(epochs: Any) -> None:
    """Make Keras inspect a batch again, after a callback has changed the parts of batches."""
    adapter = epochs.data_adapter
    adapter._output_signature = None
    epochs._distributed_dataset = adapter.get_tf_dataset()


def dataset_in(epochs: Any) -> Any:
    """Return the dataset that serves the batches, weights of classes included."""
    return epochs._distributed_dataset


def serve_dataset(epochs: Any, dataset: Any, steps: Any) -> None:
    """Serve another dataset, which is one epoch, from the next epoch on.

    `steps` is its number of batches, an int-like object; None if it is not known.
    """
    epochs._distributed_dataset = dataset
    epochs._num_batches = steps
    epochs.steps_per_epoch = epochs._current_iterator = None


def serve_joined(epochs: Any, join: Callable[[Any, int, int], Any], spec_of: Any) -> None:
    """Serve what a function makes of each batch of a PyDataset that has `with_totals`.

    Args:
        epochs: Keras's iterator of epochs.
        join: Takes a batch with the weights of its classes, its step and its total of rows.
        spec_of: Takes the spec of batches, and returns that of what `join` returns.
    """
    adapter = epochs.data_adapter

    def batches() -> Iterator[Any]:
        # Of the rest of an epoch where one is resumed.
        for step, (batch, total) in enumerate(adapter.py_dataset.with_totals()):
            yield join(adapter._standardize_batch(batch), step, total)

    signature = spec_of(epochs._distributed_dataset.element_spec)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    epochs._distributed_dataset = dataset.prefetch(tf.data.AUTOTUNE)


def leave_untuned(epochs: Any) -> None:
    """Turn tf.data's tuner off for batches that Python makes, where it has nothing to tune.

    The tuner can miss the end of an iterator. Its deletion then waits, with Python's lock held,
    until the tuner looks again: as long as the epoch took, up to 60 s.
    """
    dataset = getattr(epochs, "_distributed_dataset", None)
    if isinstance(dataset, tf.data.Dataset) and dataset.options().autotune.enabled is not False:
        options = tf.data.Options()
        options.autotune.enabled = False
        epochs._distributed_dataset = dataset.with_options(options)


def begin_epoch_at(
    epochs: Any, epoch: int, first_step: int, rest_of: Callable[[Any, int], Any]
) -> int:
    """Let the epoch that is about to begin start with a later step; return this step.

    Steps keep their numbers, for callbacks and the progress bar; this epoch has fewer of them. The
    first step is smaller than `first_step` if the epoch is too short. `epoch` is counted from the
    first epoch of training. `rest_of` takes a PyDataset and a step, and returns a PyDataset of the
    batches from that step on; None for data whose first batches must be read and dropped.
    """
    adapter = epochs.data_adapter
    data = getattr(adapter, "py_dataset", None)
    is_cut = rest_of(data, 0) is not None  # then only the data knows its number of steps
    first_batch, steps = (0, None) if is_cut else _first_batch_and_steps(epochs, epoch)
    if steps is not None and first_step >= steps:
        first_step = max(0, steps - epochs.steps_per_execution)
    n_dropped = first_batch + first_step
    if n_dropped == 0:
        return 0
    usual = epochs._enumerate_iterator

    def rest() -> Iterator[tuple[Any, ...]]:
        # Keras calls this once per epoch; the next epoch is a usual one.
        epochs._enumerate_iterator = usual
        adapter.on_epoch_begin()
        if is_cut:
            adapter.py_dataset = rest_of(data, first_step)
            try:
                yield from _steps(epochs, first_step, 0)
            finally:
                adapter.py_dataset = data
        else:
            yield from _steps(epochs, first_step, n_dropped)
        adapter.on_epoch_end()

    epochs._enumerate_iterator = rest
    return first_step


def _first_batch_and_steps(epochs: Any, epoch: int) -> tuple[int, int | None]:
    """Return the number of batches of a pass that its earlier epochs took, and an epoch's steps."""
    n_batches, per_epoch = epochs._num_batches, epochs.steps_per_epoch
    if not n_batches or not per_epoch:
        return 0, per_epoch or n_batches
    stride = epochs.steps_per_execution
    taken = math.ceil(per_epoch / stride) * stride
    first_batch = epoch % math.ceil(n_batches / taken) * taken
    return first_batch, min(per_epoch, n_batches - first_batch)


def _steps(epochs: Any, first: int, n_dropped: int) -> Iterator[tuple[Any, ...]]:
    stride = epochs.steps_per_execution
    stop = epochs.steps_per_epoch or epochs._num_batches
    dataset = epochs._get_iterator()
    iterator = iter(dataset.skip(n_dropped) if n_dropped else dataset)
    epochs._current_iterator, epochs._steps_seen = iterator, n_dropped or first
    # If a pass spans several epochs, Keras keeps its iterator, and makes a new one at the end.
    length = epochs._num_batches if epochs.steps_per_epoch else None
    numbers = range(first, int(stop), stride) if stop else itertools.count(first, stride)
    for step in numbers:
        if length and epochs._steps_seen >= length:
            break
        epochs._steps_seen += stride
        yield (step, *([step + stride - 1] if _HAS_LAST_STEP else []), iterator)
    if length and epochs._steps_seen >= length:
        epochs._current_iterator, epochs._steps_seen = iter(dataset), 0
