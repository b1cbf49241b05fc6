"""The state of a distributed optimizer, complete wherever Keras or a user looks at it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


class CompleteState:
    """What a `DistributedOptimizer` answers when its state is asked for."""

    __wrapped__: Any
    _self_update: Any

    @property
    def _parts_state(self) -> Any:
        return self._self_update and self._self_update.state

    @property
    def parts(self) -> list[Any]:
        """State of which this rank holds a part; empty unless parameters are sharded."""
        return self._parts_state.parts if self._parts_state else []

    def full_state(self) -> list[np.ndarray]:
        """Return the complete state, in the order of `variables`. Collective where it is sharded.

        Returns:
            Arrays of the shapes that an optimizer in one process has.

        Raises:
            ExchangeError: Communication failed.
        """
        if self._parts_state:
            return self._parts_state.gather()
        return [variable.numpy() for variable in self.__wrapped__.variables]

    def save_own_variables(self, store: dict[str, Any]) -> None:
        """Write the complete state, as Keras does for an optimizer in one process.

        Args:
            store: Filled with an array for each variable, by its number.
        """
        for i, value in enumerate(self.full_state()):
            store[str(i)] = value

    def load_own_variables(self, store: dict[str, Any]) -> None:
        """Take what this rank holds from a complete state.

        Args:
            store: What `save_own_variables` wrote, at any number of ranks.
        """
        state = self._parts_state
        if not state or len(store) != len(self.__wrapped__.variables):
            self.__wrapped__.load_own_variables(store)
            return
        state.load([np.asarray(store[str(i)]) for i in range(len(store))])

    def memory_report(self) -> dict[str, int]:
        """Return how much memory the optimizer's state takes.

        Returns:
            Bytes: "state" on this rank, "complete_state" in one process.
        """
        variables = self.__wrapped__.variables
        own = sum(_n_bytes(v.shape, v.dtype) for v in variables)
        state = self._parts_state
        return {"state": own, "complete_state": state.n_bytes if state else own}


def _n_bytes(shape: Any, dtype: str) -> int:
    return int(np.prod(tuple(shape))) * tf.as_dtype(dtype).size
