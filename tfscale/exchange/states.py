"""The protocol of what has a state between steps: `saved` copies it, `restored` takes it back.

A checkpoint is a loop over such states, and knows none of them by name. What a rank has `Saved` is
named by its state; the checkpoint adds numbers where there are several of a kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Range = tuple[int, int]  # of the elements of a flat variable


@dataclass(frozen=True)
class Saved:
    """The copy of a state that one rank saves.

    Attributes:
        arrays: Arrays with memory of their own, by a word and a number or name: "sum/0".
        info: A JSON value of each name.
        entries: JSON values of each name, by the second parts of names of arrays.
    """

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __or__(self, other: Saved) -> Saved:
        """Return the union of both copies; the other's entry where names are equal."""
        return Saved(
            {**self.arrays, **other.arrays},
            {**self.info, **other.info},
            {**self.entries, **other.entries},
        )

    def find(self, name: str) -> np.ndarray | None:
        """Return an array, or None; `get` expects a KeyError, files have other errors."""
        return self.arrays[name] if name in self.arrays else None  # noqa: SIM401

    def series(self, word: str) -> list[np.ndarray]:
        """Return the arrays "word/0", "word/1" and so on."""
        names = (f"{word}/{i}" for i in itertools.count())
        return [self.arrays[name] for name in itertools.takewhile(self.arrays.__contains__, names)]


@dataclass(frozen=True)
class Scope:
    """The model that a state belongs to.

    Attributes:
        weights: The weights that are equal on ranks with equal models.
        local: Weights and slots that differ between ranks.
        is_leader: Whether this rank saves what is equal on ranks with equal models.
    """

    weights: Sequence[Any]
    local: Sequence[Any]
    is_leader: bool

    @property
    def places(self) -> dict[int, int]:
        """The positions of the weights, by their ids."""
        return {id(variable): i for i, variable in enumerate(self.weights)}


class SavedStates(Protocol):
    """The copies of one state that all ranks of an earlier job have saved."""

    @property
    def scope(self) -> Scope:
        """The scope of the model as it is now."""

    @property
    def is_exact(self) -> bool:
        """True if ranks and groups are the same as before: each takes its own.

        Otherwise states are joined and shared out again.
        """

    @property
    def is_same_host(self) -> bool:
        """True if this rank also has the same place among the ranks of its host."""

    @property
    def is_end(self) -> bool:
        """True if it was saved at the end of training."""

    @property
    def size(self) -> int:
        """The number of ranks that have saved."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The ranks whose values are read, with equal models in each group.

        This rank's group, or all groups, to be averaged.
        """

    def of(self, rank: int) -> Saved:
        """Return a rank's copy; arrays are read on access."""

    @property
    def own(self) -> Saved:
        """The copy of this rank, or of one in its place if there were fewer ranks."""

    def share(self, name: str, mode: str) -> np.ndarray:
        """Return this rank's own array, or its share of all; shares reduce to the saved total.

        `mode` is how ranks are reduced: "sum", "mean", "max" or "min".
        """

    def piece(self, name: str, rank: int, start: int, stop: int) -> np.ndarray:
        """Return some elements of a rank's flattened array; no others are read."""

    def slot(self, name: str, want: Range | None) -> np.ndarray:
        """Return a slot, or a range of it, from the ranges that ranks held; a mean over groups."""


class Stateful(Protocol):
    """Something with a state that resumed runs continue with."""

    def saved(self, scope: Scope) -> Saved:
        """Return a copy of this rank's state. Sends nothing."""

    def restored(self, saved: SavedStates) -> None:
        """Take back a state that any number of ranks have saved. Collective."""


def saved_together(states: Sequence[Stateful], scope: Scope) -> Saved:
    """Return the copies of several states as one."""
    saved = Saved()
    for state in states:
        saved |= state.saved(scope)
    return saved


def copy_of(variable: Any) -> np.ndarray:
    """Return a copy of a variable's value with memory of its own."""
    value = np.asarray(variable.numpy())
    return value if value.flags.owndata and value.flags.writeable else np.array(value)
