"""Which variables make up the state of a model."""

from __future__ import annotations

from collections.abc import Iterable

import keras

from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.fit import adapted_layers
from tfscale.internals.optimizers import optimizers_of, slots_of, update_rule
from tfscale.optimizer.distributed import is_distributed

ACCUMULATORS = "_accumulated_gradients"


def process_set_of(model: keras.Model) -> ProcessSet:
    """Return the ranks that the model's optimizer keeps together."""
    return getattr(getattr(model, "optimizer", None), "process_set", global_process_set)


def distinct(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return the variables without repetition, order kept."""
    return list({id(variable): variable for variable in variables}.values())


def local_ids(model: keras.Model, variables: Iterable[keras.Variable] | None = None) -> set[int]:
    """Collect the ids of trained variables that belong to one rank only.

    Args:
        model: The model whose optimizers may have had variables registered as local.
        variables: Further local variables given by the user.

    Returns:
        `id` of each local variable and of the optimizer slots that belong to it.
    """
    # Those that are frozen now stay local; a model's `trainable_variables` leave them out.
    kept = [v for layer in model._flatten_layers() for v in layer._trainable_variables]
    local = [*(variables or ()), *_registered(model, kept)]
    return slot_ids(model, local) | {id(variable) for variable in local}


def _registered(model: keras.Model, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    known = [getattr(optimizer, "is_local_var", None) for optimizer in optimizers_of(model)]
    tests = [is_local for is_local in known if is_local is not None]
    return [v for v in variables if any(is_local(v) for is_local in tests)] if tests else []


def common_variables(
    model: keras.Model, variables: Iterable[keras.Variable] | None = None
) -> list[keras.Variable]:
    """Return weights and optimizer state without those of local layers and variables.

    States of seed generators are no weights: each rank keeps its own.

    Args:
        model: A built model.
        variables: Local variables given by the user, besides those registered with optimizers.
    """
    local = local_ids(model, variables) | {id(v) for v in _registered(model, model.weights)}
    state = distinct([*model.weights, *optimizer_variables(model)])
    return [variable for variable in state if id(variable) not in local]


def slot_ids(model: keras.Model, variables: Iterable[keras.Variable]) -> set[int]:
    """Collect the ids of the optimizer slots that belong to `variables`."""
    wanted = {id(variable) for variable in variables}
    slots: set[int] = set()
    for optimizer in optimizers_of(model) if wanted else ():
        rule = update_rule(optimizer)
        trainable = getattr(rule, "_trainable_variables", [])
        owners = slots_of(rule) if trainable else {}
        slots |= {slot for slot, index in owners.items() if id(trainable[index]) in wanted}
    return slots - wanted


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """Return learning rates, step counts and slots of all optimizers of the model.

    What differs between ranks is left out: Keras's accumulators of gradients where ranks exchange
    none, and slots of which each rank has a part (`tfscale.Sharded`).
    """
    variables: list[keras.Variable] = []
    partial: set[int] = set()
    for optimizer in optimizers_of(model):
        variables.extend(optimizer.variables)
        if not is_distributed(optimizer):
            partial |= {
                id(item) for item in getattr(update_rule(optimizer), ACCUMULATORS, None) or ()
            }
        partial |= {id(item) for item in getattr(optimizer, "parts", ())}
    return [variable for variable in distinct(variables) if id(variable) not in partial]


def broadcast_loaded(model: keras.Model, root_rank: int) -> None:
    """Give all ranks their parts of the sharded state that one rank loaded. Collective.

    Args:
        model: With or without sharded optimizers.
        root_rank: Who may have loaded some.

    Raises:
        ExchangeError: Another rank has loaded a state, and the root none.
    """
    for optimizer in optimizers_of(model):
        kept = getattr(optimizer, "kept_state", None)
        if kept is not None:
            kept.broadcast_loaded(root_rank, optimizer.process_set)


def non_trainable_state(model: keras.Model) -> list[keras.Variable]:
    """Return the floating point state that steps change beside trainable weights.

    Moving statistics are such state. Frozen kernels are not (layers hold them as trainable
    weights switched off), nor are states of seed generators, metrics, integer counters, and what
    Normalization layers were adapted to.
    """
    adapted = {id(variable) for variable in adapted_layers.statistics(model)}
    variables: list[keras.Variable] = []
    for layer in model._flatten_layers():
        variables.extend(layer._non_trainable_variables)
    return [
        item
        for item in distinct(variables)
        if "float" in keras.backend.standardize_dtype(item.dtype) and id(item) not in adapted
    ]
