"""The state of a model: its variables, sorted by the ranks that share their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.comm.runtime import global_process_set
from tfscale.fit import adapted_layers
from tfscale.fit.metric_updates import metrics_of, reductions_of
from tfscale.internals.keras import layers_of, seeds_of, state_of, weights_of
from tfscale.internals.optimizers import (
    gradient_sums,
    optimizers_of,
    slots_of,
    trained_by,
    update_rule,
)
from tfscale.optimizer.distributed import distributed_of, distributed_optimizers


def distinct(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return the variables without repetition, order kept."""
    return list({id(variable): variable for variable in variables}.values())


def local_ids(model: keras.Model, variables: Iterable[keras.Variable] = ()) -> set[int]:
    """Return the ids of weights registered as local, of further `variables`, and of their slots."""
    # Frozen weights stay local, but are missing in a model's `trainable_variables`.
    kept = [v for layer in layers_of(model) for v in weights_of(layer)]
    local = {id(v) for v in [*variables, *_registered(model, kept)]}
    slots: set[int] = set()
    for optimizer in optimizers_of(model) if local else ():
        rule = update_rule(optimizer)
        trainable = trained_by(rule)
        owners = slots_of(rule) if trainable else {}
        slots |= {slot for slot, index in owners.items() if id(trainable[index]) in local}
    return local | slots


def _registered(model: keras.Model, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    known = distributed_optimizers(model)
    return [v for v in variables if any(o.is_local_var(v) for o in known)]


def common_variables(
    model: keras.Model, variables: Iterable[keras.Variable] = ()
) -> list[keras.Variable]:
    """Return weights and optimizer state, without local ones, `variables` and seed generators."""
    local = local_ids(model, variables) | {id(v) for v in _registered(model, model.weights)}
    state = distinct([*model.weights, *optimizer_variables(model)])
    return [variable for variable in state if id(variable) not in local]


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """Return learning rates, step counts and slots of all optimizers of the model.

    Variables that differ between ranks are left out: Keras's gradient accumulators if ranks
    exchange no gradients, and slots of which each rank has a part (`tfscale.Sharded`).
    """
    variables: list[keras.Variable] = []
    partial: set[int] = set()
    for optimizer in optimizers_of(model):
        variables.extend(optimizer.variables)
        distributed = distributed_of(optimizer)
        kept = distributed and distributed.bound.kept
        own = kept.parts if kept else []
        if distributed is None:
            own = gradient_sums(update_rule(optimizer))
        partial |= {id(item) for item in own}
    return [variable for variable in distinct(variables) if id(variable) not in partial]


def broadcast_loaded(model: keras.Model, root_rank: int) -> None:
    """Send all ranks their parts of the sharded state that one rank may have loaded. Collective."""
    for optimizer in distributed_optimizers(model):
        kept = optimizer.bound.kept
        if kept is not None:
            kept.broadcast_loaded(root_rank, optimizer.bound.process_set)


def non_trainable_state(model: keras.Model) -> list[keras.Variable]:
    """Return the floating point variables, besides trainable weights, that steps change.

    These are moving statistics, for example. Not included are frozen kernels (layers hold them as
    trainable weights switched off), states of seed generators, metrics, integer counters, and the
    statistics of adapted Normalization layers.
    """
    adapted = {id(variable) for variable in adapted_layers.statistics(model)}
    variables: list[keras.Variable] = []
    for layer in layers_of(model):
        variables.extend(state_of(layer))
    return [
        item
        for item in distinct(variables)
        if "float" in keras.backend.standardize_dtype(item.dtype) and id(item) not in adapted
    ]


def metric_states(model: keras.Model) -> list[tuple[keras.Variable, str, str]]:
    """Return each state variable of the metrics, its reduction over ranks, and its label."""
    states: dict[int, tuple[keras.Variable, str, str]] = {}
    for metric in metrics_of(model):
        for variable, mode in zip(metric.variables, reductions_of(model, metric), strict=True):
            label = f"{metric.name}/{variable.name}{tuple(variable.shape)} {mode}"
            states.setdefault(id(variable), (variable, mode, label))
    return list(states.values())


@dataclass(frozen=True)
class Variables:
    """A model's variables: `weights` are equal within a group of ranks, others differ by rank."""

    weights: list[Any]
    state: list[Any]  # non-trainable variables of layers, such as moving statistics
    seeds: list[Any]  # of the layers' seed generators, uint32 (seed, numbers drawn)
    local: list[Any]  # weights registered as local, and their slots

    @staticmethod
    def of(model: keras.Model) -> Variables:
        """Sort the variables of a built model and the local slots of its optimizers."""
        ids = local_ids(model)
        state = distinct(v for layer in layers_of(model) for v in state_of(layer))
        own = {id(v) for v in state}
        weights = distinct(model.weights)
        slots = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
        return Variables(
            weights=[v for v in weights if id(v) not in own | ids],
            state=state,
            seeds=[state for layer in layers_of(model) for state in seeds_of(layer)],
            local=[v for v in distinct([*weights, *slots]) if id(v) in ids],
        )


def groups_of(model: keras.Model) -> list[list[int]]:
    """Return the ranks whose models are equal, each rank in one group."""
    size = runtime.size()
    distributed = distributed_optimizers(model)
    if size > 1 and not distributed:
        return [[rank] for rank in range(size)]
    if not distributed or distributed[0].bound.process_set is global_process_set:
        groups = distributed[0].bound.groups if distributed else None
        return [list(g) for g in groups.ranks] if groups else [list(range(size))]
    members = list(distributed[0].bound.process_set.group().ranks)
    return [members, *([rank] for rank in range(size) if rank not in members)]


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the group of a rank."""
    return next(group for group in groups if rank in group)
