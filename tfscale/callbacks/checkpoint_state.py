"""All that a run needs to go on: copied from a model on each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from tfscale.callbacks import backup_state, metric_states, model_state
from tfscale.callbacks.random_state import read_random_state
from tfscale.checkpoints.parts import Part
from tfscale.comm import runtime
from tfscale.comm.runtime import global_process_set
from tfscale.internals.optimizers import optimizers_of
from tfscale.optimizer.distributed import is_distributed


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


def variables_of(model: keras.Model) -> Variables:
    """Sort the variables of a built model and the local slots of its optimizers."""
    ids = model_state.local_ids(model)
    state = model_state.distinct(
        v for layer in model._flatten_layers() for v in layer._non_trainable_variables
    )
    own = {id(v) for v in state}
    weights = model_state.distinct(model.weights)
    slots = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    return Variables(
        weights=[v for v in weights if id(v) not in own | ids],
        state=state,
        seeds=backup_state.seeds_of(model),
        local=[v for v in model_state.distinct([*weights, *slots]) if id(v) in ids],
    )


def groups_of(model: keras.Model) -> list[list[int]]:
    """Return the ranks whose models are equal, each rank in one group."""
    size = runtime.size()
    distributed = [o for o in optimizers_of(model) if is_distributed(o)]
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
    """Return what an optimizer's variables mean, as JSON: their shapes do not tell.

    Names of layers are left out, as Keras numbers them.
    """
    names, inner = [], optimizer
    while inner is not None:
        names.append(inner.__class__.__name__)  # not `type`: that of a proxy is its own
        inner = getattr(inner, "inner_optimizer", None)
    return {"class": " of ".join(names), "slots": [_last_word(v.path) for v in optimizer.variables]}


def _last_word(path: str) -> str:
    """Return "momentum" of "adam/dense_3_kernel_momentum", "variable" of "variable_2"."""
    words = [word for word in re.split("[/_]", path) if not word.isdigit()]
    return words[-1] if words else ""


@dataclass
class Position:
    """Where a run stands.

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


@dataclass
class Snapshot:
    """What is copied on this rank, under names; see `restore` for their meaning."""

    model: keras.Model
    position: Position
    run: str
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def take(self) -> Part:
        """Copy everything. Nothing is sent."""
        groups = groups_of(self.model)
        rank = runtime.rank()
        is_leader = group_of(rank, groups)[0] == rank
        variables = variables_of(self.model)
        self.info = {
            "run": self.run,
            "step": self.position.n_steps,
            "size": runtime.size(),
            "groups": groups,
            "position": dict(vars(self.position)),
            "random": read_random_state(),
            "weights": [[v.path, list(v.shape)] for v in variables.weights],
            "optimizers": [len(o.variables) for o in optimizers_of(self.model)],
            "rules": [rule_of(o) for o in optimizers_of(self.model)],
            "ranges": {},
        }
        if is_leader:
            self._add("weight", variables.weights)
        self._add("state", variables.state)
        self._add("seed", variables.seeds)
        self._add("local", variables.local)
        self._add_optimizers(is_leader, {id(v) for v in variables.local})
        self._add_metrics()
        self._add_callbacks(is_leader)
        return Part(self.info, self.arrays)

    def _add(self, name: str, variables: Sequence[Any]) -> None:
        for i, variable in enumerate(variables):
            self.arrays[f"{name}/{i}"] = copy_of(variable)

    def _add_optimizers(self, is_leader: bool, local: set[int]) -> None:
        self.info["accumulated"] = []
        for k, optimizer in enumerate(optimizers_of(self.model)):
            kept = getattr(optimizer, "kept_state", None)
            shared = kept.state.shared if kept else frozenset()
            if is_leader:
                for i, variable in enumerate(optimizer.variables):
                    if i not in shared and id(variable) not in local:
                        self.arrays[f"optimizer{k}/{i}"] = copy_of(variable)
            for i, (part, held) in (kept.state.own_parts() if kept else {}).items():
                self.arrays[f"part{k}/{i}"] = copy_of(part)
                self.info["ranges"][f"{k}/{i}"] = held
            average = getattr(optimizer, "group_average", None)
            if average is not None and (kept or is_leader):
                self._add(f"average{k}", average.variables)
            accumulator = getattr(optimizer, "accumulator", None)
            count, sums = (accumulator and accumulator.state()) or (0, [])
            self.info["accumulated"].append(count)
            self.arrays |= {f"sum{k}/{i}": value for i, value in enumerate(sums)}

    def _add_metrics(self) -> None:
        states = metric_states.states_of(self.model) if self.position.step else []
        self.info["metrics"] = [[mode, list(v.shape)] for v, mode, _ in states]
        self._add("metric", [variable for variable, _, _ in states])

    def _add_callbacks(self, is_leader: bool) -> None:
        """Arrays of callbacks are equal within a group."""
        self.info["callbacks"] = []
        for j, callback in enumerate(backup_state.resumable_callbacks()):
            state = dict(callback.backup_state())
            arrays = state.pop("arrays", [])
            self.info["callbacks"].append({"kind": backup_state.kind_of(callback), "state": state})
            if is_leader:
                for i, array in enumerate(arrays):
                    self.arrays[f"callback{j}/{i}"] = np.array(array)


def is_broken(model: keras.Model) -> bool:
    """Return whether a weight that is trained is not finite on this rank.

    A loss that is not finite does not tell: such steps may have been skipped.
    """
    weights = model_state.distinct(model.trainable_variables)
    return not all(np.all(np.isfinite(np.asarray(v.numpy()))) for v in weights)


def copy_of(variable: Any) -> np.ndarray:
    """Return a copy of a variable's value that nobody else writes to."""
    value = np.asarray(variable.numpy())
    return value if value.flags.owndata and value.flags.writeable else np.array(value)
