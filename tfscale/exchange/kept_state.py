"""The complete state of a sharded optimizer, for as long as it is valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.comm import objects, runtime
from tfscale.comm.runtime import ProcessSet
from tfscale.config import ExchangeError, settings
from tfscale.exchange.meeting import Meeting, require_all_ranks
from tfscale.exchange.shard_state import ShardState

Key = tuple[int, ...]


class KeptState:
    """What ranks have gathered, until the next update or load makes it outdated.

    With it one rank saves without asking the others: all took part in the gather before.
    """

    def __init__(self, state: ShardState, process_set: ProcessSet) -> None:
        """Keep nothing yet. All ranks that share do this at the same place of their program.

        Args:
            state: The parts that this rank has.
            process_set: Who has the others.
        """
        self.state = state
        self.process_set = process_set
        self._meeting = Meeting(process_set.group())
        self._arrays: list[np.ndarray] | None = None
        self._key: Key | None = None
        self._loaded: tuple[Key, list[np.ndarray]] | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether all ranks gathered what is still valid, and some of them kept it."""
        return self._key is not None and self._key == self.state.version

    @property
    def is_here(self) -> bool:
        """Whether this rank has the complete state."""
        return self.is_gathered and self._arrays is not None

    def gather(self, is_kept: bool) -> list[np.ndarray]:
        """Gather the parts of all ranks. Collective.

        Args:
            is_kept: Keep the result here; at least one rank does.

        Returns:
            The complete state, or an empty list on ranks that do not keep it.

        Raises:
            ExchangeError: Communication failed.
        """
        self.forget()
        arrays = self.state.gather(is_kept)
        self._arrays = arrays if is_kept else None
        self._key = self.state.version
        return arrays

    def keep_on_first(self) -> None:
        """Keep on the first rank of the process set only what all ranks have just gathered."""
        if self.process_set.rank() > 0:
            self._arrays = None

    def meet(self, what: str) -> None:
        """Wait for all ranks. Collective.

        Args:
            what: What this rank is about to do, for the message.

        Raises:
            ExchangeError: Some rank has not come in time.
        """
        require_all_ranks(self._meeting, settings().save_timeout_s, what)

    def read(self, what: str = "reading the optimizer's state") -> list[np.ndarray]:
        """Return the complete state; collective unless it `is_gathered`.

        Args:
            what: What this rank is about to do, for the message.

        Raises:
            ExchangeError: Other ranks do not take part, or another one has kept the state.
        """
        if not self.is_gathered:
            self.meet(what)
            return self.gather(is_kept=True)
        if self._arrays is None:
            raise ExchangeError(
                "After ranks have gathered the optimizer's state, the rank that keeps it must "
                f"save it. Received: {what} on rank {runtime.rank()}. Save on the first rank, "
                "usually rank 0, or call model.optimizer.full_state() on every rank to use its "
                "result."
            )
        return self.state.with_current(self._arrays)

    def load(self, state: Sequence[np.ndarray], first: int = 0, keeps: bool = True) -> None:
        """Take this rank's part of a complete state.

        Args:
            state: One array for each variable of the optimizer, from number `first` on.
            first: See `state`.
            keeps: Keep it for `broadcast_loaded`, if it is all of the state.

        Raises:
            ValueError: A shape does not fit.
        """
        self.forget()
        self.state.load(state, first)
        if keeps and len(state) == self.state.n_variables:
            self._loaded = (self.state.version, list(state))

    def serve(self, rule: Any, first: int) -> None:
        """Let the optimizer below loss scaling save and load complete state: Keras asks it, too.

        Args:
            rule: That optimizer.
            first: Number of its first variable among those of the outer one.
        """

        def save_own_variables(store: dict[str, Any]) -> None:
            for i, value in enumerate(self.read("saving")[first:]):
                store[str(i)] = value

        def load_own_variables(store: dict[str, Any]) -> None:
            # The outer one has loaded it all, see CompleteState.load_own_variables.
            del store

        rule.save_own_variables = save_own_variables
        rule.load_own_variables = load_own_variables

    def broadcast_loaded(self, root_rank: int, process_set: ProcessSet) -> bool:
        """Give all ranks their parts of the state that one rank loaded. Collective.

        Args:
            root_rank: Which one; the first of the process set, if it is none of it. Where it has
                loaded none since the last update, nothing happens: the parts that the ranks hold
                belong together.
            process_set: Who takes part.

        Returns:
            Whether there was one.

        Raises:
            ExchangeError: Another rank has loaded a state, and the root none.
        """
        ranks = process_set.group().ranks
        root = root_rank if root_rank in ranks else ranks[0]
        valid = self._loaded is not None and self._loaded[0] == self.state.version
        own = self._loaded[1] if self._loaded is not None and valid else None
        every = objects.allgather_object(own is not None, "who loaded a state", process_set)
        loaders = [rank for rank, has in zip(ranks, every, strict=True) if has]
        if loaders and root not in loaders:
            raise ExchangeError(
                "An optimizer's state must be loaded by the rank that is broadcast, or by none. "
                f"Received: a state loaded on ranks {loaders}, root_rank={root}. Load it on "
                f"rank {root} or on all ranks."
            )
        if not loaders:
            return False
        self.forget()
        for i in range(self.state.n_variables):
            value = own[i] if own is not None and runtime.rank() == root else None
            value = objects.broadcast_object(value, root, "complete state", process_set)
            self.state.load([value], i)
        return True

    def forget(self) -> None:
        """Keep nothing; what was gathered or loaded takes memory no longer."""
        self._arrays = self._key = self._loaded = None
