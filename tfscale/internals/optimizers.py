"""Internals of Keras optimizers: variables, slots, settings, and methods replaced in a step.

Undocumented names of Keras used here, checked with Keras 3.10 and 3.15:
`Optimizer._trainable_variables`, `_variables`, `_get_variable_index`, `_iterations`,
`_learning_rate`, `_var_key`, `_accumulated_gradients`, `_use_weight_decay`,
`_exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern`,
`_model_variables_moving_average`, `_update_model_variables_moving_average`, `_track_variable`,
`_tracker`, `_trainable_variables_indices`, `_distribution_strategy`, `_all_reduce_sum_gradients`,
`_apply_weight_decay`, `_backend_apply_gradients`;
`Variable.overwrite_with_gradient`, `Variable._path`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import wrapt

from tfscale.internals import stack
from tfscale.internals.keras import is_built, raw_variable

_MAX_FRAMES = 32  # between LossScaleOptimizer.apply and here, those of tf.cond included
# Those that make variables of their own, which are no variables of Keras.
_STRATEGIES = (
    *(tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy),
    *(tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
    *(tf.distribute.ParameterServerStrategy, tf.distribute.experimental.CentralStorageStrategy),
)
_DECAY_EXCLUSIONS = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


def scaled_by(optimizer: Any) -> Any:
    """Return the optimizer that a LossScaleOptimizer wraps; None for other objects."""
    is_scaler = type(optimizer) is keras.optimizers.LossScaleOptimizer
    return optimizer.inner_optimizer if is_scaler else None


def update_rule(optimizer: Any) -> Any:
    """Return the optimizer that holds the update rule, inside any loss scaling."""
    while isinstance(getattr(optimizer, "inner_optimizer", None), keras.optimizers.Optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def inner_optimizers(rule: Any) -> list[Any]:
    """Return the optimizers of a `keras.optimizers.MultiOptimizer`; none for other rules."""
    multi = getattr(keras.optimizers, "MultiOptimizer", None)  # older versions have none
    return list(rule.optimizers) if multi is not None and isinstance(rule, multi) else []


def has_outer_scaler(distributed: type) -> bool:
    """Return whether the stack has a LossScaleOptimizer around an optimizer of class `distributed`.

    The caller is then the inner optimizer of a loss scaler.
    """
    owners = itertools.islice(stack.owners_around(), _MAX_FRAMES)
    return any(type(scaled_by(owner)) is distributed for owner in owners)


def is_wrapped(optimizer: Any) -> bool:
    """Return whether an optimizer is a `DistributedOptimizer`, the only proxy of optimizers."""
    return issubclass(type(optimizer), wrapt.ObjectProxy)


def trained_by(rule: Any) -> list[Any]:
    """Return the variables that an update rule was built on; empty before it is built."""
    return list(rule._trainable_variables)


def index_of(rule: Any, variable: Any) -> int:
    """Return the position of a variable that an update rule was built on."""
    return int(rule._get_variable_index(variable))


def strategies_of(model: Any) -> list[Any]:
    """Return the strategies of tf.distribute in whose scope a model and its optimizer were made."""
    rule = update_rule(optimizer_of(model))
    both = (
        getattr(model, "distribute_strategy", None),
        getattr(rule, "_distribution_strategy", None),
    )
    return [strategy for strategy in both if isinstance(strategy, _STRATEGIES)]


def optimizer_of(model: Any) -> Any:
    """Return a model's optimizer; None if it was never compiled."""
    return getattr(model, "optimizer", None)


def iterations_of(optimizer: Any) -> Any:
    """Return the variable that counts the steps of an update rule."""
    return update_rule(optimizer)._iterations


def n_updates(optimizer: Any) -> int:
    """Return the step that a schedule is called with; under accumulation it counts batches."""
    return int(keras.ops.convert_to_numpy(optimizer._iterations))


def rate_of(rule: Any) -> Any:
    """Return the learning rate as stored: a variable, a schedule or a function."""
    return rule._learning_rate


def set_rate(rule: Any, rate: float) -> None:
    """Set the learning rate, also in place of a schedule, which Keras's setter refuses."""
    if isinstance(rule._learning_rate, keras.Variable):
        rule.learning_rate = rate
    else:
        rule._learning_rate = keras.Variable(rate, name="learning_rate", trainable=False)


def gradient_sums(rule: Any) -> list[Any]:
    """Return Keras's sums of gradients under `gradient_accumulation_steps`."""
    return list(getattr(rule, "_accumulated_gradients", None) or ())


def own_variables(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables without those of an inner optimizer."""
    return list(optimizer._variables)


def slots_of(rule: Any) -> dict[int, int]:
    """Map the `id` of each slot of an update rule to the position of the variable it belongs to.

    Keras keeps each kind of slot in a list of the same length and order as the trainable variables,
    so the position identifies the variable and names are not needed.
    """
    trainable = rule._trainable_variables
    positions: dict[int, int] = {}
    for name, value in vars(rule).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, list | tuple):
            continue
        if len(value) == len(trainable):
            positions |= {id(slot): i for i, slot in enumerate(value) if hasattr(slot, "assign")}
    for inner in inner_optimizers(rule):
        places = [index_of(rule, variable) for variable in inner._trainable_variables]
        positions |= {slot: places[i] for slot, i in slots_of(inner).items()}
    return positions


def overwrites_with_gradient(variable: Any) -> bool:
    """Return whether Keras assigns a variable's gradient to it, as to the scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers of a model, compiled or not, including those of a custom train_step.

    `model.optimizer` comes first, then the optimizers among the model's attributes, or in lists,
    tuples and dicts among these, in the order of the attributes, which is equal on all ranks.
    """
    unique: dict[int, Any] = {}
    for item in _items([getattr(model, "optimizer", None), *vars(model).values()], set()):
        if isinstance(item, keras.optimizers.Optimizer):
            unique.setdefault(id(update_rule(item)._iterations), item)
    return list(unique.values())


def _items(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield values, and those inside containers; `seen` holds the ids of visited containers."""
    for value in values:
        if not isinstance(value, (list, tuple, dict)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            yield from _items(value.values() if isinstance(value, dict) else value, seen)


def trains_all(model: keras.Model) -> bool:
    """Return whether the one optimizer of a model can be built on all its variables.

    Several optimizers are each built on their own variables, in the first step.
    """
    return len(optimizers_of(model)) == 1 and is_built(model)


def piece_of(variable: keras.Variable, value: Any, is_whole: bool) -> keras.Variable:
    """Return a variable for a part of another one, with its name, path and role.

    With `is_whole` the part also takes over the constraint.
    """
    piece = keras.Variable(value, dtype=variable.dtype, name=variable.name)
    piece._path = variable.path
    if overwrites_with_gradient(variable):
        piece.overwrite_with_gradient = True
    if is_whole:
        piece.constraint = variable.constraint
    return piece


@contextlib.contextmanager
def replaced(target: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one object, not of its class, within a block."""
    before = {name: vars(target)[name] for name in methods if name in vars(target)}
    target.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del target.__dict__[name]
        target.__dict__.update(before)


@contextlib.contextmanager
def decaying_as(rule: Any, originals: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Let the weight decay of each piece follow the rule's answer for its original variable.

    A piece lacks the name of its variable's layer, by which Keras may exclude variables from weight
    decay. The rule was built on the pieces; `originals` are pairs of piece and variable.
    """
    ask = type(rule)._use_weight_decay
    variable_of = {rule._var_key(raw_variable(piece)): variable for piece, variable in originals}

    def use_weight_decay(variable: Any) -> bool:
        original = variable_of.get(rule._var_key(raw_variable(variable)))
        if original is not None:  # rules pass Keras's variables or TensorFlow's
            is_keras = isinstance(variable, keras.Variable)
            variable = original if is_keras else raw_variable(original)
        return bool(ask(rule, variable))

    with replaced(rule, _use_weight_decay=use_weight_decay):
        yield


@contextlib.contextmanager
def averages_begin_within(rule: Any, n_steps: int) -> Iterator[None]:
    """Start moving averages of weights with the first update, if it takes several batches.

    Keras starts them when `iterations` is 0. The batch that ends a cycle of `n_steps` batches never
    has that number, so the averages would start from zeros.
    """
    if not rule.use_ema:
        yield
        return
    average = rule._update_model_variables_moving_average

    def begin_or_continue(variables: Sequence[Any]) -> None:
        average(variables)
        is_first = tf.convert_to_tensor(rule._iterations) < n_steps
        for variable, mean in zip(variables, rule._model_variables_moving_average, strict=True):
            if mean is not None:
                mean.assign(tf.where(is_first, variable.value, mean.value))

    with replaced(rule, _update_model_variables_moving_average=begin_or_continue):
        yield


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return the `get_config` of an optimizer, without an inner one.

    A schedule or function as learning rate need not be serializable before the model is saved: it
    is shown as its class, and its settings if it has any.
    """
    if scaled_by(optimizer) is not None:  # its `get_config` includes the inner one
        scaler_settings = ("name", "initial_scale", "dynamic_growth_steps")
        return {name: getattr(optimizer, name) for name in scaler_settings}
    rate = vars(optimizer).get("_learning_rate")
    if rate is None or isinstance(rate, keras.Variable) or not callable(rate):
        return dict(optimizer.get_config())
    with replaced(optimizer, _learning_rate=np.float32(0)):
        config = dict(optimizer.get_config())
    shown: dict[str, Any] = {"class_name": getattr(rate, "__name__", type(rate).__name__)}
    # Functions have no settings, and a schedule needs no `get_config` before it is saved.
    with contextlib.suppress(AttributeError, NotImplementedError):
        shown["config"] = rate.get_config()
    return config | {"learning_rate": shown}


def unbuilt(optimizer: Any) -> Any:
    """Return an optimizer with the same settings, the same schedule if any, and no state."""
    config, inner = config_of(optimizer), scaled_by(optimizer)
    if inner is not None:
        return type(optimizer)(unbuilt(inner), **config)
    if not isinstance(optimizer._learning_rate, keras.Variable):
        config["learning_rate"] = optimizer._learning_rate  # the same object: it may have a state
    other = type(optimizer).from_config(config)
    for name in _DECAY_EXCLUSIONS:
        if hasattr(optimizer, name):
            setattr(other, name, getattr(optimizer, name))
    return other


def unbuild(optimizer: Any) -> None:
    """Take an optimizer back to the time before `build`, without slots.

    It stays the same object, with its settings, learning rate and count of steps, which a script
    may hold.
    """
    inner = scaled_by(optimizer)
    if inner is not None:
        unbuild(inner)
    kept = [optimizer._iterations, optimizer._learning_rate]
    kept = [v for v in optimizer._variables if any(v is each for each in kept)]
    dropped = {id(v) for v in optimizer._variables} - {id(v) for v in kept}
    for name, value in list(vars(optimizer).items()):
        slots = value if isinstance(value, list | tuple) else [value]
        if any(id(slot) in dropped for slot in slots):
            delattr(optimizer, name)
    tracker = optimizer._tracker
    del optimizer._tracker  # it would put a list of its own into `_variables`
    # A new list: tf.train.Checkpoint saves none that has lost an element.
    optimizer._variables, optimizer._trainable_variables = [], []
    optimizer._tracker = tracker
    optimizer._trainable_variables_indices = {}
    tracker.config["variables"] = (tracker.config["variables"][0], optimizer._variables)
    tracker.stored_ids["variables"].clear()
    for variable in kept:
        optimizer._track_variable(variable)
    optimizer.built = False


def unlisted_state(rule: Any) -> dict[str, np.ndarray]:
    """Return by attribute the values of variables that Keras does not list, and so does not save.

    An example is Nadam's product of momenta inside of loss scaling.
    """
    listed = {id(v) for v in rule._variables}
    variables = {n: v for n, v in vars(rule).items() if isinstance(v, keras.Variable)}
    return {name: v.numpy() for name, v in variables.items() if id(v) not in listed}


_HOLDER = "_tfscale_holder"


class _Held:
    """The link from an update rule to its holder: Keras walks over saveable attributes.

    Copies of the rule have no holder.
    """

    def __init__(self, holder: Any = None) -> None:
        self.holder = holder

    def __reduce__(self) -> Any:
        return _Held, ()


def holder_of(rule: Any) -> Any:
    """Return the distributed optimizer that has built an update rule on pieces of variables."""
    return vars(rule)[_HOLDER].holder if _HOLDER in vars(rule) else None


def set_holder(rule: Any, holder: Any) -> None:
    """Record which distributed optimizer has built an update rule on pieces; None for variables."""
    vars(rule)[_HOLDER] = _Held(holder)


# Updates of some rows of a variable.


def slot_lists(rule: Any, index: int) -> list[tuple[str, int, Any]]:
    """Return (attribute, position, slot) of each slot of the variable at a position of a rule."""
    n_variables, slots = len(rule._trainable_variables), []
    for name, value in vars(rule).items():
        if name in ("_variables", "_trainable_variables", "_accumulated_gradients"):
            continue
        is_list = isinstance(value, list | tuple) and len(value) == n_variables
        if is_list and hasattr(value[index], "assign"):
            slots.append((name, index, value[index]))
    return slots


@contextlib.contextmanager
def rows_in_place_of(
    rule: Any, index: int, slots: Sequence[tuple[str, int, Any]]
) -> Iterator[None]:
    """Within a block, let a rule take rows for its variable at `index`, and others for slots.

    `slots` are as those of `slot_lists`, with what takes their places.
    """
    lists = {name: list(getattr(rule, name)) for name, _, _ in slots}
    for name, i, rows in slots:
        lists[name][i] = rows
    with replaced(rule, **lists, _get_variable_index=lambda _: index):  # type: ignore[arg-type]
        yield


def decays(rule: Any, variable: Any) -> bool:
    """Return whether an update rule decays the weights of a variable."""
    return rule.weight_decay is not None and bool(rule._use_weight_decay(raw_variable(variable)))


def decay_function(rule: Any) -> Callable[[Sequence[Any]], None]:
    """Return the method by which Keras decays the weights of variables."""
    return rule._apply_weight_decay  # type: ignore[no-any-return]


def apply_function(rule: Any) -> Callable[[Sequence[Any], Sequence[Any]], None]:
    """The method by which Keras accumulates and clips gradients, and updates variables."""
    return rule._backend_apply_gradients  # type: ignore[no-any-return]
