"""The optimizer's state when each rank holds a part: gathered to save it, cut to load it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.backends.base import Call
from tfscale.comm.runtime import ProcessSet
from tfscale.exchange.shards import Shards


def slots_of(rule: Any) -> dict[int, int]:
    """Map the `id` of each slot of an update rule to the position of the variable it belongs to.

    Keras keeps every kind of slot in a list as long as that of the trainable variables and in the
    same order, so position identifies a slot and names are not needed.

    Args:
        rule: A built Keras optimizer, not one that scales the loss.
    """
    trainable = rule._trainable_variables
    found: dict[int, int] = {}
    for name, value in vars(rule).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, list | tuple):
            continue
        if len(value) == len(trainable):
            found |= {id(slot): i for i, slot in enumerate(value) if hasattr(slot, "assign")}
    return found


class ShardState:
    """Reads and writes the complete state of an optimizer that was built on pieces.

    Complete state is a list of arrays in the order of `variables` of the same optimizer built on
    whole variables, which is Keras's own format.
    """

    def __init__(self, optimizer: Any, rule: Any, shards: Shards, process_set: ProcessSet) -> None:
        """Find out which variable each slot belongs to.

        Args:
            optimizer: Built on the pieces of `shards`, and on variables that are not shared.
            rule: The optimizer below loss scaling.
            shards: What is cut.
            process_set: The ranks that share.
        """
        self._process_set = process_set
        self._optimizer = optimizer
        self._shards = shards
        targets = {id(piece): i for i, piece in enumerate(shards.pieces)}
        places = [targets.get(id(v), -1) for v in rule._trainable_variables]
        self._slots = {key: places[i] for key, i in slots_of(rule).items()}
        self._rule = rule
        self._n_loads = 0

    @property
    def _places(self) -> list[int]:
        # Of the present variables: a schedule that is set takes away the learning rate's.
        return [self._slots.get(id(v), -1) for v in self._optimizer.variables]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with each update and each load, and where variables have come or gone."""
        return int(self._rule._iterations.numpy()), self._n_loads, self.n_variables

    def number(self, variable: Any) -> int:
        """Return the number of one of the optimizer's variables."""
        return next(i for i, own in enumerate(self._optimizer.variables) if own is variable)

    @property
    def n_variables(self) -> int:
        """Number of the optimizer's variables."""
        return len(self._optimizer.variables)

    @property
    def parts(self) -> list[Any]:
        """The optimizer's variables of which this rank holds a part."""
        pairs = zip(self._optimizer.variables, self._places, strict=True)
        return [variable for variable, place in pairs if place >= 0]

    def own_parts(self) -> dict[int, tuple[Any, tuple[int, int] | None]]:
        """Map the number of each variable of which this rank holds a part to it and its range.

        A range counts elements of the flat variable, the last one excluded; None: all of it.
        """
        found: dict[int, tuple[Any, tuple[int, int] | None]] = {}
        for i, (variable, place) in enumerate(
            zip(self._optimizer.variables, self._places, strict=True)
        ):
            owned = self._shards.owned(place) if place >= 0 else None
            if owned is not None:
                whole = self._shards.is_whole(place)
                found[i] = variable, None if whole else (owned.start, owned.stop)
        return found

    @property
    def shared(self) -> frozenset[int]:
        """Numbers of the variables of which each rank has a part, perhaps an empty one."""
        return frozenset(i for i, place in enumerate(self._places) if place >= 0)

    def note_load(self) -> None:
        """Count a load that went past `load`, so that what was gathered is outdated."""
        self._n_loads += 1

    def whole_variables(self) -> dict[int, Any]:
        """Map the `id` of each piece to the model's variable."""
        pairs = zip(self._shards.pieces, self._shards.variables, strict=True)
        return {id(piece): variable for piece, variable in pairs}

    @property
    def n_bytes(self) -> int:
        """Bytes of the complete state, for update rules whose slots are as large as variables."""
        total = 0
        for variable, place in zip(self._optimizer.variables, self._places, strict=True):
            shape = variable.shape if place < 0 else self._shards.variables[place].shape
            total += math.prod(shape) * tf.as_dtype(variable.dtype).size
        return total

    def gather(self, is_kept: bool = True) -> list[np.ndarray]:
        """Return the complete state. Collective: all ranks that share, on the main thread.

        Args:
            is_kept: False takes part without keeping anything, and returns an empty list.

        Raises:
            ExchangeError: Communication failed.
        """
        pairs = list(zip(self._optimizer.variables, self._places, strict=True))
        own = {
            i: tuple(v.shape)
            for i, (v, place) in enumerate(pairs)
            if place >= 0 and self._shards.is_whole(place) and self._shards.owned(place)
        }
        whole: dict[int, tuple[int, ...]] = {}
        if any(self._shards.is_whole(place) for _, place in pairs):
            for shapes in objects.allgather_object(
                own, name="shapes of slots", process_set=self._process_set
            ):
                whole |= shapes
        state = []
        for i, (variable, place) in enumerate(pairs):
            value = variable.numpy() if place < 0 else self._gather(variable, place)
            if place >= 0:
                shape = tuple(self._shards.variables[place].shape)
                value = value.reshape(whole.get(i, shape) if shape else ())
            if is_kept:
                state.append(value)
        return state

    def _gather(self, slot: Any, place: int) -> np.ndarray:
        flat = tf.reshape(slot.value, [-1])
        if not self._shards.owned(place):
            flat = flat[:0]  # A whole variable's slot may have dimensions that are not empty.
        call = Call(self._shards.group, f"state of {self._shards.variables[place].path}")
        gathered, _ = runtime.backend().allgather(flat, call)
        return gathered.numpy()

    def with_current(self, state: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return a complete state with the present values of what every rank has.

        A learning rate may have changed since the state was gathered, or a loss scale.

        Args:
            state: What `gather` returned.
        """
        triples = zip(self._optimizer.variables, self._places, state, strict=True)
        return [v.numpy() if place < 0 else value for v, place, value in triples]

    def load(self, state: Sequence[np.ndarray], first: int = 0) -> None:
        """Take this rank's part of a complete state.

        Args:
            state: One array for each variable of the optimizer, from number `first` on; equal on
                all ranks.
            first: See `state`.

        Raises:
            ValueError: A shape does not fit.
        """
        self.note_load()
        stop = first + len(state)
        pairs = zip(self._optimizer.variables[first:stop], self._places[first:stop], strict=True)
        for value, (variable, place) in zip(state, pairs, strict=True):
            if place < 0:
                variable.assign(value)
            elif self._shards.owned(place):
                own = self._cut(np.asarray(value), place)
                variable.assign(own.reshape(tuple(variable.shape)))

    def _cut(self, value: np.ndarray, place: int) -> np.ndarray:
        owned = self._shards.owned(place)
        assert owned is not None
        if self._shards.is_whole(place):
            return value
        return value.reshape(-1)[owned.start : owned.stop]
