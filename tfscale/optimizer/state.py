"""Complete state of an optimizer whose ranks hold parts: gather, keep, load and checkpoint it.

`KeptState` gathers state, keeps the result and cuts state that is loaded; `Slots` are the parts in
checkpoints of tfscale. For tf.train.Checkpoint a node stands for the optimizer, with complete
state.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.backends.base import Call
from tfscale.comm.meeting import Meeting
from tfscale.comm.runtime import ProcessSet
from tfscale.config import ExchangeError
from tfscale.exchange.shards import Shards
from tfscale.exchange.states import Range, Saved, SavedStates, Scope, copy_of
from tfscale.exchange.tables import TableRows
from tfscale.internals import optimizers as internals
from tfscale.internals.keras import replace_methods, restore_methods
from tfscale.internals.tracking import ReplacingNode, ValueNode

Version = tuple[int, ...]
_MASTER = "weight"  # begins the names of exact parts of weights
_OTHER_SAVES = (
    ": each path is written once. Or call model.optimizer.full_state() on every rank, then save on "
    "rank 0 alone. In fit, ModelCheckpoint may be given to rank 0 alone if every rank has a "
    "tfscale callback"
)


class Gathered(abc.ABC):
    """State that all ranks gather and some of them keep, valid until the next update or load.

    So one rank can save it without the others, which took part in the gather.
    """

    process_set: ProcessSet
    _arrays: Any = None
    _gathered_at: Version | None = None

    @abc.abstractmethod
    def _version(self) -> Version:
        """A value that changes with updates and loads."""

    def _keep(self, arrays: Any) -> None:
        """Keep what was gathered at this version; None on ranks that do not keep it."""
        self._arrays, self._gathered_at = arrays, self._version()

    @property
    def is_gathered(self) -> bool:
        """True while gathered state is valid; at least one rank has it."""
        return self._gathered_at is not None and self._gathered_at == self._version()

    @property
    def is_here(self) -> bool:
        """True if this rank has the valid state."""
        return self.is_gathered and self._arrays is not None

    def keep_on_first(self) -> None:
        """Drop the gathered state on all ranks but the first of the process set."""
        if self.process_set.rank() > 0:
            self._arrays = None

    def forget(self) -> None:
        """Drop gathered state, which frees its memory."""
        self._arrays = self._gathered_at = None


class KeptState(Gathered):
    """The complete state of an optimizer that was built on pieces.

    Complete state is a list of arrays in the order of `variables` of the same optimizer built on
    whole variables, which is Keras's own format.
    """

    def __init__(self, optimizer: Any, rule: Any, shards: Shards, process_set: ProcessSet) -> None:
        """Create without gathered state, on all ranks at the same point of their program.

        `optimizer` is built on the targets of `shards`; `rule` is the optimizer inside loss
        scaling.
        """
        self.process_set = process_set
        self._optimizer, self._rule, self._shards = optimizer, rule, shards
        targets = {id(piece): i for i, piece in shards.pieces.items()}
        places = [targets.get(id(v), -1) for v in internals.trained_by(rule)]
        self._slots = {key: places[i] for key, i in internals.slots_of(rule).items()}
        self._meeting = Meeting(process_set.group(), "the optimizer's state", _OTHER_SAVES)
        # What stands for the optimizer in a checkpoint: the model's variables for pieces of them,
        # and complete slots for parts.
        replaced = {id(p): (p, shards.variables[i]) for i, p in shards.pieces.items()}
        replaced |= {id(v): (v, self._node_of(v)) for v in self.parts}
        self.node = ReplacingNode(optimizer, replaced)
        self._n_loads = 0
        self._loaded: tuple[Version, list[np.ndarray]] | None = None
        self._shown: list[Any] | None = None  # complete values, while `complete_variables` runs
        if rule is not optimizer:
            self._serve(first=len(internals.own_variables(optimizer)))

    def _placed(self) -> list[tuple[Any, int]]:
        """Pair the optimizer's variables with positions in `shards`; -1 if every rank has them.

        Not cached: the learning rate's variable is removed when a schedule is set.
        """
        return [(v, self._slots.get(id(v), -1)) for v in self._optimizer.variables]

    def _version(self) -> Version:
        """A value that changes with updates, loads and the number of variables."""
        n_updates = int(internals.iterations_of(self._rule).numpy())
        return n_updates, self._n_loads, len(self._optimizer.variables)

    # What this rank holds

    @property
    def parts(self) -> list[Any]:
        """The optimizer's variables of which this rank holds a part."""
        return [variable for variable, target in self._placed() if target >= 0]

    @property
    def shared(self) -> frozenset[int]:
        """Indices of the variables of which each rank has a part, perhaps an empty one."""
        return frozenset(i for i, (_, target) in enumerate(self._placed()) if target >= 0)

    def own_parts(self) -> dict[int, tuple[Any, tuple[int, int] | None]]:
        """Map the index of each variable of which this rank holds a part to variable and range.

        A range is (start, stop) in elements of the flat variable, or None for the whole variable.
        """
        part_by_position: dict[int, tuple[Any, tuple[int, int] | None]] = {}
        for i, (variable, target) in enumerate(self._placed()):
            owned = self._shards.owned(target)
            if owned is not None:
                is_whole = self._shards.is_whole(target)
                part_by_position[i] = variable, None if is_whole else (owned.start, owned.stop)
        return part_by_position

    @property
    def n_bytes(self) -> int:
        """Bytes of the complete state, for update rules whose slots are as large as variables."""
        return n_bytes([v if i < 0 else self._shards.variables[i] for v, i in self._placed()])

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables, with complete values in a block of `complete_variables`."""
        return self._optimizer.variables if self._shown is None else self._shown

    @contextlib.contextmanager
    def complete_variables(self) -> Iterator[None]:
        """Let `variables` hold complete values within a block, for reading only."""
        pairs = zip(self._optimizer.variables, self.read(), strict=True)
        with tf.device("CPU:0"):  # complete state need not fit into a GPU
            self._shown = [internals.piece_of(v, value, is_whole=False) for v, value in pairs]
        try:
            yield
        finally:
            self._shown = None

    # Gathering

    def gather(self, is_kept: bool = True) -> list[np.ndarray]:
        """Gather and return the complete state. Collective, on the main thread.

        At least one rank must keep it (`is_kept`); on all others the list is empty.
        """
        self.forget()
        self._shards.publish_exact()  # what is saved with the state has no rounded parameters
        pairs = self._placed()
        whole = self._shapes_of_whole(pairs)
        arrays = []
        for i, (variable, target) in enumerate(pairs):
            value = variable.numpy() if target < 0 else self._gather(variable, target)
            if target >= 0:
                shape = tuple(self._shards.variables[target].shape)
                value = value.reshape(whole.get(i, shape) if shape else ())
            if is_kept:
                arrays.append(value)
        self._keep(arrays if is_kept else None)
        return arrays

    def _shapes_of_whole(self, pairs: Sequence[tuple[Any, int]]) -> dict[int, tuple[int, ...]]:
        """Gather the shapes of slots that one rank owns; those of other ranks may differ."""
        if not any(self._shards.is_whole(target) for _, target in pairs):
            return {}
        shapes_here = {
            i: tuple(variable.shape)
            for i, (variable, target) in enumerate(pairs)
            if self._shards.is_whole(target) and self._shards.owned(target)
        }
        shapes_by_rank = objects.allgather_object(shapes_here, "shapes of slots", self.process_set)
        return {i: shape for shapes in shapes_by_rank for i, shape in shapes.items()}

    def _gather(self, slot: Any, target: int) -> np.ndarray:
        flat = tf.reshape(slot.value, [-1])
        if not self._shards.owned(target):
            flat = flat[:0]  # The slot of an empty piece may have elements.
        call = Call(self._shards.group, f"state of {self._shards.variables[target].path}")
        gathered, _ = runtime.backend().allgather(flat, call)
        return gathered.numpy()

    def forget(self) -> None:
        """Drop gathered and loaded state, which frees its memory."""
        self._arrays = self._gathered_at = self._loaded = None

    def meet(self, what: str) -> None:
        """Wait for all ranks; `what` names the operation in the error. Collective."""
        self._meeting.wait(what)

    def read(self, what: str = "reading the optimizer's state") -> list[np.ndarray]:
        """Return the complete state; collective unless it `is_gathered`."""
        if not self.is_gathered:
            self.meet(what)
            return self.gather()
        if self._arrays is None:
            raise ExchangeError(
                f"{what} must run on the rank that keeps the gathered optimizer state. Received: "
                f"{what} on rank {runtime.rank()}. Save on the first rank, usually rank 0, or "
                "call model.optimizer.full_state() on every rank to use its result."
            )
        # Learning rate and loss scale may have changed since; every rank has the present value.
        kept = zip(self._placed(), self._arrays, strict=True)
        return [v.numpy() if target < 0 else value for (v, target), value in kept]

    # Loading

    def _node_of(self, part: Any) -> ValueNode:
        """Return the node of a part in a checkpoint: gathered when saved, cut when restored."""

        def index() -> int:
            return next(i for i, own in enumerate(self._optimizer.variables) if own is part)

        return ValueNode(
            part,
            read=lambda: self.read("writing a checkpoint")[index()],
            restore=lambda value: self.load([value], index(), keeps=False),
        )

    def load(self, state: Sequence[np.ndarray], first: int = 0, keeps: bool = True) -> None:
        """Load this rank's part of a complete state, of variables from index `first` on.

        `state` is equal on all ranks. With `keeps`, it is kept for `broadcast_loaded` if complete.
        """
        self.note_load()
        pairs = self._placed()
        for value, (variable, target) in zip(state, pairs[first : first + len(state)], strict=True):
            owned = self._shards.owned(target)
            if target < 0:
                variable.assign(value)
            elif owned is not None:
                part = np.asarray(value)
                if not self._shards.is_whole(target):
                    part = part.reshape(-1)[owned.start : owned.stop]
                variable.assign(part.reshape(tuple(variable.shape)))
        if keeps and len(state) == len(pairs):
            self._loaded = (self._version(), list(state))

    def note_load(self) -> None:
        """Count a load, by `load` or otherwise: gathered state is outdated."""
        self.forget()
        self._n_loads += 1

    def broadcast_loaded(self, root_rank: int, process_set: ProcessSet) -> None:
        """Give all ranks their parts of the state that `root_rank` loaded. Collective.

        If the root is not a member of the process set, its first rank takes its place. If no rank
        has loaded a state since the last update, nothing happens: the ranks' parts belong together.
        It is an error if another rank has loaded a state, and the root has not.
        """
        ranks = process_set.group().ranks
        root = root_rank if root_rank in ranks else ranks[0]
        loaded = self._loaded[1] if self._loaded and self._loaded[0] == self._version() else None
        has_loaded_by_rank = objects.allgather_object(
            loaded is not None, "who loaded a state", process_set
        )
        loaders = [rank for rank, has in zip(ranks, has_loaded_by_rank, strict=True) if has]
        if not loaders:
            return
        if root not in loaders:
            raise ExchangeError(
                "root_rank must have loaded the optimizer's state if any rank has. Received: a "
                f"state loaded on ranks {loaders}, root_rank={root}. Load it on rank {root} or "
                "on all ranks."
            )
        for i in range(len(self._optimizer.variables)):
            value = loaded[i] if loaded is not None and runtime.rank() == root else None
            value = objects.broadcast_object(value, root, "complete state", process_set)
            self.load([value], i, keeps=False)

    def _serve(self, first: int) -> None:
        """Let the optimizer inside loss scaling save and load complete state: Keras calls it, too.

        `first` is the index of its first variable among those of the outer optimizer.
        """

        def save_own_variables(store: dict[str, Any]) -> None:
            for i, value in enumerate(self.read("saving")[first:]):  # a store is not a dict
                store[str(i)] = value

        def load_own_variables(store: dict[str, Any]) -> None:
            del store  # the outer optimizer has loaded all state

        replace_methods(
            self._rule, save_own_variables=save_own_variables, load_own_variables=load_own_variables
        )

    def stop_serving(self) -> None:
        """Leave saving and loading to the optimizer, which is about to be built on other pieces."""
        restore_methods(self._rule, "save_own_variables", "load_own_variables")


class Slots:
    """The variables of an optimizer in checkpoints, and exact parts of weights that are rounded."""

    def __init__(
        self, optimizer: Any, kept: KeptState | None = None, shards: Shards | None = None
    ) -> None:
        """`kept` and `shards` are those of an optimizer that was built on pieces."""
        self._optimizer, self._kept, self._shards = optimizer, kept, shards

    def saved(self, scope: Scope) -> Saved:
        """Copy this rank's parts, and on one rank of a group what is equal in it."""
        whole, parts = self._slots(scope)
        arrays = {f"optimizer/{i}": copy_of(v) for i, v in whole.items() if scope.is_leader}
        arrays |= {f"part/{i}": copy_of(part) for i, (part, _) in parts.items()}
        ranges: dict[str, Range | None] = {str(i): held for i, (_, held) in parts.items()}
        for name, (piece, held) in self._masters(scope).items():
            arrays[f"part/{name}"] = copy_of(piece).reshape(-1)
            ranges[name] = held
        return Saved(arrays, {}, {"ranges": ranges})

    def restored(self, saved: SavedStates) -> None:
        """Restore exact weights, all of them if they are not rounded now, and the variables."""
        masters = self._masters(saved.scope)
        names = {name for rank in range(saved.size) for name in saved.of(rank).entries["ranges"]}
        for name in (name for name in names if name.startswith(_MASTER)):
            weight = saved.scope.weights[int(name.removeprefix(_MASTER))]
            variable, held = masters.get(name, (weight, None))
            _assign(variable, held, saved, name)
        whole, parts = self._slots(saved.scope)
        for i, variable in whole.items():
            _assign(variable, None, saved, str(i))
        for i, (part, held) in parts.items():
            _assign(part, held, saved, str(i))
        if self._kept is not None:
            self._kept.note_load()

    def _slots(self, scope: Scope) -> tuple[dict[int, Any], dict[int, tuple[Any, Range | None]]]:
        """Return the variables that are equal in a group, and this rank's parts, both by index.

        Local variables are left out. A part comes with its range of the flat variable, or of the
        flat table in the order of positions; None for all.
        """
        shared = self._kept.shared if self._kept else frozenset()
        local = {id(variable) for variable in scope.local}
        numbered = list(enumerate(self._optimizer.variables))
        rule = internals.update_rule(self._optimizer)
        trained, owners = internals.trained_by(rule), internals.slots_of(rule)
        rows = {i: trained[owners[id(v)]] for i, v in numbered if id(v) in owners}
        of_tables = {
            i: (v, rows[i].held) for i, v in numbered if isinstance(rows.get(i), TableRows)
        }
        apart = shared | of_tables.keys()
        whole = {i: v for i, v in numbered if i not in apart and id(v) not in local}
        return whole, {**(self._kept.own_parts() if self._kept else {}), **of_tables}

    def _masters(self, scope: Scope) -> dict[str, tuple[Any, Range]]:
        """Return this rank's exact parts of weights that are sent rounded, with their ranges."""
        shards, places = self._shards, scope.places
        if shards is None or not shards.rounds:
            return {}
        masters = {}
        for index, piece in shards.pieces.items():
            variable, owned = shards.variables[index], shards.owned(index)
            if id(variable) in places:
                held = (owned.start, owned.stop) if owned else (0, 0)
                masters[f"{_MASTER}{places[id(variable)]}"] = piece, held
        return masters


def _assign(variable: Any, want: Range | None, saved: SavedStates, name: str) -> None:
    variable.assign(np.reshape(saved.slot(name, want), tuple(variable.shape)))


def n_bytes(variables: Any) -> int:
    """Return the size of variables in bytes."""
    return sum(int(np.prod(tuple(v.shape))) * tf.as_dtype(v.dtype).size for v in variables)
