"""The state of a model: its variables by who has which values, and a snapshot of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfscale.checkpoints.files import Part
from tfscale.checkpoints.resumable import kind_of, read_counters, resumables
from tfscale.comm import runtime
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import ConfigError
from tfscale.fit import adapted_layers
from tfscale.internals.keras import gradient_sums, layers_of, state_of, trained_by, weights_of
from tfscale.internals.keras import seeds_of as seeds_of_layer
from tfscale.internals.optimizers import optimizer_of, optimizers_of, slots_of, update_rule
from tfscale.optimizer.distributed import distributed_of, distributed_optimizers

REDUCTIONS = ("sum", "mean", "max", "min")  # of metrics' states over ranks


def process_set_of(model: keras.Model) -> ProcessSet:
    """Return the ranks that the model's optimizer keeps together."""
    distributed = distributed_of(optimizer_of(model))
    return global_process_set if distributed is None else distributed.process_set


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
    kept = [v for layer in layers_of(model) for v in weights_of(layer)]
    local = [*(variables or ()), *_registered(model, kept)]
    return slot_ids(model, local) | {id(variable) for variable in local}


def _registered(model: keras.Model, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    known = distributed_optimizers(model)
    return [v for v in variables if any(o.is_local_var(v) for o in known)]


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
        trainable = trained_by(rule)
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
        distributed = distributed_of(optimizer)
        own = gradient_sums(update_rule(optimizer)) if distributed is None else distributed.parts
        partial |= {id(item) for item in own}
    return [variable for variable in distinct(variables) if id(variable) not in partial]


def broadcast_loaded(model: keras.Model, root_rank: int) -> None:
    """Give all ranks their parts of the sharded state that one rank loaded. Collective.

    Args:
        model: With or without sharded optimizers.
        root_rank: Who may have loaded some.

    Raises:
        ExchangeError: Another rank has loaded a state, and the root none.
    """
    for optimizer in distributed_optimizers(model):
        if optimizer.kept_state is not None:
            optimizer.kept_state.broadcast_loaded(root_rank, optimizer.process_set)


def non_trainable_state(model: keras.Model) -> list[keras.Variable]:
    """Return the floating point state that steps change beside trainable weights.

    Moving statistics are such state. Frozen kernels are not (layers hold them as trainable
    weights switched off), nor are states of seed generators, metrics, integer counters, and what
    Normalization layers were adapted to.
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


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """Return the states of the layers' random numbers: uint32 (seed, numbers drawn) each.

    Keras does not save them with the weights.
    """
    return [state for layer in layers_of(model) for state in seeds_of_layer(layer)]


def metric_states(model: keras.Model) -> list[tuple[keras.Variable, str, str]]:
    """Return each state variable of the metrics, how it is reduced over ranks, and its label.

    Raises:
        ConfigError: A metric's `tfscale_reduce` is unknown.
    """
    states: dict[int, tuple[keras.Variable, str, str]] = {}
    for metric in metrics_of(model):
        mode = getattr(metric, "tfscale_reduce", "sum")
        if mode not in REDUCTIONS:
            raise ConfigError(
                f"tfscale_reduce of a metric must be one of {', '.join(map(repr, REDUCTIONS))}. "
                f"Received: {mode!r} for metric {metric.name!r}. Leave it out for states that add."
            )
        for variable in metric.variables:
            label = f"{metric.name}/{variable.name}{tuple(variable.shape)} {mode}"
            states.setdefault(id(variable), (variable, mode, label))
    return list(states.values())


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics of a model, those inside of the one that compile() makes included."""
    found: list[keras.metrics.Metric] = []
    for metric in model.metrics:
        parts = getattr(metric, "metrics", None)
        found.extend(parts if isinstance(parts, list) else [metric])
    return found


@dataclass(frozen=True)
class Variables:
    """A model's variables by who has which values.

    Attributes:
        weights: Equal within a group of ranks.
        state: Kept by layers beside their weights, such as moving statistics: each rank's own.
        seeds: Of the layers' random numbers: each rank's own.
        local: Registered as local, and their slots: each rank's own.
    """

    weights: list[Any]
    state: list[Any]
    seeds: list[Any]
    local: list[Any]

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
            seeds=seeds_of(model),
            local=[v for v in distinct([*weights, *slots]) if id(v) in ids],
        )


def groups_of(model: keras.Model) -> list[list[int]]:
    """Return the ranks whose models are equal, each rank in one group."""
    size = runtime.size()
    distributed = distributed_optimizers(model)
    if size > 1 and not distributed:
        return [[rank] for rank in range(size)]
    if not distributed or distributed[0].process_set is global_process_set:
        groups = distributed[0].groups if distributed else None
        return [list(g) for g in groups] if groups else [list(range(size))]
    members = list(distributed[0].process_set.group().ranks)
    return [members, *([rank] for rank in range(size) if rank not in members)]


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the group that a rank belongs to."""
    return next(group for group in groups if rank in group)


def rule_of(optimizer: Any) -> dict[str, Any]:
    """Return number and meaning of an optimizer's variables, as JSON: shapes do not tell.

    Names of layers are left out, as Keras numbers them.
    """
    names, inner = [], optimizer
    while inner is not None:
        names.append(inner.__class__.__name__)  # not `type`: that of a proxy is its own
        inner = getattr(inner, "inner_optimizer", None)
    slots = [_last_word(v.path) for v in optimizer.variables]
    return {"class": " of ".join(names), "n": len(slots), "slots": slots}


def _last_word(path: str) -> str:
    """Return "momentum" of "adam/dense_3_kernel_momentum", "variable" of "variable_2"."""
    words = [word for word in re.split("[/_]", path) if not word.isdigit()]
    return words[-1] if words else ""


def read_random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python and numpy, as JSON."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set both generators to what `read_random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))


@dataclass
class Position:
    """A place in a run.

    Attributes:
        epoch: That runs, or comes next; counted from 0.
        step: Number of the next step within it.
        n_steps: Training steps since the beginning of the run.
        data: State of the `GlobalBatches` that is trained on, or None.
    """

    epoch: int = 0
    step: int = 0
    n_steps: int = 0
    data: dict[str, int] | None = None


def take_snapshot(
    model: keras.Model, callbacks: Sequence[Any], position: Position, run: str, is_end: bool
) -> Part:
    """Copy this rank's part of a checkpoint. Nothing is sent.

    The first rank of each group copies what is equal in it. `restore.Restore` reads the arrays.

    Args:
        model: Built; between two steps.
        callbacks: Of the running `fit`.
        position: Between the same steps.
        run: See `files.folder_name`.
        is_end: Training ends, so no callback has begun the epoch that comes next.
    """
    groups, rank = groups_of(model), runtime.rank()
    is_leader = group_of(rank, groups)[0] == rank
    variables, optimizers = Variables.of(model), optimizers_of(model)
    metrics = metric_states(model) if position.step else []
    arrays: dict[str, np.ndarray] = {}
    info: dict[str, Any] = {
        "run": run,
        "step": position.n_steps,
        "size": runtime.size(),
        "groups": groups,
        "position": dict(vars(position)),
        "is_end": is_end,
        "random": read_random_state(),
        "weights": [[v.path, list(v.shape)] for v in variables.weights],
        "rules": [rule_of(o) for o in optimizers],
        "ranges": {},
        "accumulated": [],
        "metrics": [[mode, list(v.shape)] for v, mode, _ in metrics],
        "callbacks": [],
        "keras_callbacks": read_counters(callbacks, is_end),
    }

    def add(name: str, of: Sequence[Any]) -> None:
        arrays.update({f"{name}/{i}": copy_of(variable) for i, variable in enumerate(of)})

    if is_leader:
        add("weight", variables.weights)
    add("state", variables.state)
    add("seed", variables.seeds)
    add("local", variables.local)
    add("metric", [variable for variable, _, _ in metrics])
    local = {id(v) for v in variables.local}
    for k, optimizer in enumerate(optimizers):
        distributed = distributed_of(optimizer)
        kept = None if distributed is None else distributed.kept_state
        shared = kept.shared if kept else frozenset()
        if is_leader:
            for i, variable in enumerate(optimizer.variables):
                if i not in shared and id(variable) not in local:
                    arrays[f"optimizer{k}/{i}"] = copy_of(variable)
        for i, (part, held) in (kept.own_parts() if kept else {}).items():
            arrays[f"part{k}/{i}"] = copy_of(part)
            info["ranges"][f"{k}/{i}"] = held
        average = None if distributed is None else distributed.group_average
        if average is not None and (kept or is_leader):
            add(f"average{k}", average.variables)
        accumulator = None if distributed is None else distributed.accumulator
        count, sums = (accumulator and accumulator.state()) or (0, [])
        info["accumulated"].append(count)
        arrays |= {f"sum{k}/{i}": value for i, value in enumerate(sums)}
    for j, callback in enumerate(resumables(callbacks)):
        state = dict(callback.backup_state())
        own = state.pop("arrays", [])
        info["callbacks"].append({"kind": kind_of(callback), "state": state})
        if is_leader:
            arrays |= {f"callback{j}/{i}": np.array(array) for i, array in enumerate(own)}
    return Part(info, arrays)


def is_broken(model: keras.Model) -> bool:
    """Return whether a weight that is trained is not finite on this rank.

    A loss that is not finite does not tell: such steps may have been skipped.
    """
    weights = distinct(model.trainable_variables)
    return not all(np.all(np.isfinite(np.asarray(v.numpy()))) for v in weights)


def copy_of(variable: Any) -> np.ndarray:
    """Return a copy of a variable's value that nothing else writes to."""
    value = np.asarray(variable.numpy())
    return value if value.flags.owndata and value.flags.writeable else np.array(value)
