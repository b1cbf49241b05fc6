"""The state of a model: its variables, sorted by the ranks that share their values."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.exchange.states import Saved, SavedStates, Scope, copy_of
from tfscale.exchange.tables import TableRows, table_of
from tfscale.fit import adapted_layers
from tfscale.fit.metric_updates import metrics_of, reductions_of
from tfscale.internals.keras import layers_of, seeds_of, state_of, weights_of
from tfscale.internals.optimizers import optimizers_of, slots_of, trained_by, update_rule
from tfscale.layers.sharded_embedding import sharded_embeddings
from tfscale.optimizer.distributed import differing_variables, distributed_optimizers

logger = logging.getLogger("tfscale")


def distinct(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return the variables without repetition, order kept."""
    return list({id(variable): variable for variable in variables}.values())


def local_ids(model: keras.Model, variables: Iterable[keras.Variable] = ()) -> set[int]:
    """Return the ids of weights registered as local, of further `variables`, and of their slots."""
    # Frozen weights stay local, but are missing in a model's `trainable_variables`.
    weights = [v for layer in layers_of(model) for v in weights_of(layer)]
    local = {id(v) for v in [*variables, *_registered(model, weights)]}
    local |= {id(layer.rows) for layer in sharded_embeddings(model)}
    slots: set[int] = set()
    for optimizer in optimizers_of(model) if local else ():
        rule = update_rule(optimizer)
        trainable = trained_by(rule)
        owners = slots_of(rule) if trainable else {}
        slots |= {slot for slot, index in owners.items() if id(trainable[index]) in local}
    return local | slots


def table_ids(model: keras.Model) -> set[int]:
    """Return the ids of the rows of tables, and of the slots for them."""
    ids = {id(layer.rows) for layer in sharded_embeddings(model)}
    for optimizer in optimizers_of(model) if ids else ():
        rule = update_rule(optimizer)
        trained = trained_by(rule)
        owners = slots_of(rule) if trained else {}
        ids |= {slot for slot, index in owners.items() if table_of(trained[index]) is not None}
    return ids


def _registered(model: keras.Model, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    optimizers = distributed_optimizers(model)
    return [v for v in variables if any(o.is_local_var(v) for o in optimizers)]


def common_variables(
    model: keras.Model, variables: Iterable[keras.Variable] = ()
) -> list[keras.Variable]:
    """Return weights and optimizer state, without local ones, `variables` and seed generators."""
    local = (
        local_ids(model, variables)
        | table_ids(model)
        | {id(v) for v in _registered(model, model.weights)}
    )
    state = distinct([*model.weights, *optimizer_variables(model)])
    return [variable for variable in state if id(variable) not in local]


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """Return learning rates, step counts and slots of all optimizers of the model.

    Variables that differ between ranks are left out.
    """
    optimizers = optimizers_of(model)
    differing = {id(v) for optimizer in optimizers for v in differing_variables(optimizer)}
    variables = distinct(v for optimizer in optimizers for v in optimizer.variables)
    return [variable for variable in variables if id(variable) not in differing]


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


class ModelState:
    """The variables of a built model, without metrics and optimizers.

    Attributes:
        weights: They are equal within a group of ranks; all others differ by rank.
        state: Non-trainable variables of layers, such as moving statistics.
        seeds: Of the layers' seed generators, uint32 (seed, numbers drawn).
        local: Weights registered as local, and their slots.
    """

    def __init__(self, model: keras.Model) -> None:
        """Sort the variables of a built model and the local slots of its optimizers."""
        self._model, ids = model, local_ids(model)
        self.state = distinct(v for layer in layers_of(model) for v in state_of(layer))
        state_ids = {id(v) for v in self.state}
        weights = distinct(model.weights)
        slots = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
        self.weights = [v for v in weights if id(v) not in state_ids | ids]
        self.seeds = [state for layer in layers_of(model) for state in seeds_of(layer)]
        tables = table_ids(model)  # a `TableState` has these
        local = [v for v in distinct([*weights, *slots]) if id(v) in ids]
        self.local = [v for v in local if id(v) not in tables]

    def scope(self, groups: Sequence[Sequence[int]]) -> Scope:
        """Return the scope of the model for other states; models of a group are equal."""
        rank = runtime.rank()
        return Scope(self.weights, self.local, group_of(rank, groups)[0] == rank)

    def saved(self, scope: Scope) -> Saved:
        """Copy the variables that this rank saves."""
        named = {
            "weight": self.weights if scope.is_leader else [],
            **{"state": self.state, "seed": self.seeds, "local": self.local},
        }
        arrays = {f"{k}/{i}": copy_of(v) for k, of in named.items() for i, v in enumerate(of)}
        return Saved(arrays, {"weights": [[v.path, list(v.shape)] for v in self.weights]})

    def restored(self, saved: SavedStates) -> None:
        """Restore weights and the values that differ between ranks. Collective."""
        for i, variable in enumerate(self.weights):
            groups = [saved.of(group[0]).arrays[f"weight/{i}"] for group in saved.groups]
            variable.assign(mean_of(groups))
        of_rank, n_ranks = saved.own, range(saved.size)
        for i, variable in enumerate(self.local):
            variable.assign(of_rank.arrays[f"local/{i}"])
        for i, variable in enumerate(self.state):
            parts = [of_rank] if saved.is_exact else map(saved.of, n_ranks)
            variable.assign(mean_of([part.arrays[f"state/{i}"] for part in parts]))
        for i, variable in enumerate(self.seeds):
            seed = of_rank.arrays[f"seed/{i}"]
            if runtime.rank() >= saved.size:  # keep this seed; restore the count of numbers drawn
                seed = np.array([variable.numpy()[0], seed[1]], seed.dtype)
            variable.assign(seed)
        adapted_layers.refresh_all(self._model)


class TableState:
    """The rows of a model's tables, of which each rank saves its own."""

    def __init__(self, model: keras.Model) -> None:
        self._tables = [layer.rows for layer in sharded_embeddings(model)]

    def saved(self, scope: Scope) -> Saved:
        """Copy this rank's rows."""
        del scope
        arrays = {f"table/{i}": copy_of(rows) for i, rows in enumerate(self._tables)}
        descriptions = [[r.path, r.table.n_rows, r.table.factor, *r.held] for r in self._tables]
        return Saved(arrays, {"tables": descriptions})

    def restored(self, saved: SavedStates) -> None:
        """Restore this rank's rows from those of any number of ranks, in slices."""
        tables_by_rank = [saved.of(rank).info.get("tables", []) for rank in range(saved.size)]
        require_tables(self._tables, tables_by_rank[0])
        for i, rows in enumerate(self._tables):
            for rank, tables in enumerate(tables_by_rank):
                *_, begin, end = tables[i]
                read = functools.partial(saved.piece, f"table/{i}", rank)
                rows.take((begin, end), read)


def require_tables(tables: Sequence[TableRows], before: Sequence[Sequence[Any]]) -> None:
    """Raise a ConfigError unless a model has the tables of a checkpoint."""
    now = [[rows.table.n_rows, rows.table.factor] for rows in tables]
    if now != [list(known[1:3]) for known in before]:
        names = [rows.path for rows in tables]
        raise ConfigError(
            f"ShardedEmbedding layers must be those of the checkpoint. Received: {names} with "
            f"rows and factors {now}; the checkpoint has {list(before)}. Build the same model, or "
            "pass another directory."
        )


class MetricState:
    """The states of a model's metrics, within an epoch."""

    def __init__(self, model: keras.Model, is_within_epoch: bool = True) -> None:
        self._states = metric_states(model) if is_within_epoch else []

    def saved(self, scope: Scope) -> Saved:
        """Copy the variables of this rank's metrics."""
        del scope
        arrays = {f"metric/{i}": copy_of(v) for i, (v, _, _) in enumerate(self._states)}
        return Saved(arrays, {"metrics": [[mode, list(v.shape)] for v, mode, _ in self._states]})

    def restored(self, saved: SavedStates) -> None:
        """Restore this rank's states, or shares of them."""
        before = saved.of(0).info["metrics"]
        if [shape for _, shape in before] != [list(v.shape) for v, _, _ in self._states]:
            logger.warning("The metrics are others than before: they begin again in this epoch.")
            return
        # How they are reduced may be known only after the first step.
        for i, ((variable, _, _), (mode, _)) in enumerate(zip(self._states, before, strict=True)):
            variable.assign(saved.share(f"metric/{i}", mode))


def mean_of(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of arrays; the first one for integers and if all are equal."""
    first = values[0]
    is_integer = first.dtype.kind in "iub"
    if is_integer or all(np.array_equal(v, first, equal_nan=True) for v in values[1:]):
        return first
    return np.mean(np.asarray(values, np.float64), axis=0).astype(first.dtype)


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the group of a rank."""
    return next(group for group in groups if rank in group)
