"""The state of a distributed optimizer, complete wherever Keras or a user looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.runtime import ProcessSet
from tfscale.config import ConfigError
from tfscale.update.rebuilding import unbuilt


class CompleteVariable:
    """A variable of the optimizer with its complete value, for Keras's HDF5 format."""

    def __init__(self, path: str, value: np.ndarray) -> None:
        """Keep both."""
        self.path = path
        self._value = np.asarray(value)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Return the value."""
        del copy
        return self._value if dtype is None else self._value.astype(dtype)


class CompleteState:
    """What a `DistributedOptimizer` answers when its state is asked for."""

    __slots__ = ()  # `vars` of the proxy stays that of the wrapped optimizer

    __wrapped__: Any
    _self_update: Any
    _self_accumulator: Any
    _self_reducer: Any
    _update: Any
    _self_shown: list[CompleteVariable] | None = None

    @property
    def kept_state(self) -> Any:
        """The complete state, as far as it is known; None unless parameters are sharded."""
        return self._self_update and self._self_update.kept

    @property
    def shares_state(self) -> bool:
        """Whether each rank holds a part of the state, or will once it is built."""
        return bool(self._update().is_sharded)

    @property
    def may_share_state(self) -> bool:
        """Whether the exchange may decide during a `fit` that each rank holds a part."""
        return self._self_reducer.may_cut

    @property
    def sharing_set(self) -> ProcessSet:
        """The ranks that share the state."""
        return self._self_reducer.process_set

    @property
    def parts(self) -> list[Any]:
        """State of which this rank holds a part; empty unless parameters are sharded."""
        return self.kept_state.state.parts if self.kept_state else []

    @property
    def variables(self) -> list[Any]:
        """The wrapped optimizer's variables; those in `parts` are this rank's parts."""
        return self.__wrapped__.variables if self._self_shown is None else self._self_shown

    @contextlib.contextmanager
    def complete_variables(self) -> Iterator[None]:
        """Let `variables` hold complete values within a block, for reading only."""
        if self.kept_state:
            pairs = zip(self.__wrapped__.variables, self.kept_state.read(), strict=True)
            shown = [CompleteVariable(v.path, value) for v, value in pairs]
            self._self_shown = shown  # type: ignore[misc]  # a slot of the proxy's
        try:
            yield
        finally:
            self._self_shown = None  # type: ignore[misc]

    def full_state(self) -> list[np.ndarray]:
        """Return the complete state, in the order of `variables`.

        Collective where parameters are sharded: all ranks must call this. Until the next step the
        first rank keeps the result, so that it can save the model without the others.

        Returns:
            Arrays of the shapes that an optimizer in one process has.

        Raises:
            ExchangeError: Communication failed.
        """
        kept = self.kept_state
        if not kept:
            return [variable.numpy() for variable in self.__wrapped__.variables]
        arrays = kept.gather(is_kept=True)
        kept.keep_on_first()
        return arrays

    def save_own_variables(self, store: dict[str, Any]) -> None:
        """Write the complete state, as Keras does for an optimizer in one process.

        Collective where parameters are sharded, unless `full_state` was called before.

        Args:
            store: Filled with an array for each variable, by its number.

        Raises:
            ExchangeError: Other ranks do not take part.
        """
        if not self.kept_state:
            self.__wrapped__.save_own_variables(store)
            return
        for i, value in enumerate(self.kept_state.read("saving")):
            store[str(i)] = value

    def load_own_variables(self, store: dict[str, Any]) -> None:
        """Take what this rank holds from a complete state.

        Args:
            store: What `save_own_variables` wrote, at any number of ranks.
        """
        if not self.kept_state or len(store) != len(self.__wrapped__.variables):
            self.__wrapped__.load_own_variables(store)
            return
        self.kept_state.load([np.asarray(store[str(i)]) for i in range(len(store))])

    def _fresh(self) -> Any:
        return unbuilt(self.__wrapped__) if self.kept_state else None

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        if not self.kept_state:
            return self.__wrapped__._trackable_children(save_type, **options)
        return self._self_update.nodes.children(self.__wrapped__, save_type, **options)

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        if not self.kept_state:
            if not self.__wrapped__.built and runtime.is_initialized() and self.shares_state:
                raise ConfigError(
                    "A checkpoint must be restored into a sharded optimizer after it is built, or "
                    f"its state would be lost. Received: {self.__wrapped__.name}, not built. Call "
                    "tfscale.prepare(model), or optimizer.build(variables), before restoring."
                )
            return self.__wrapped__._lookup_dependency(name, cached_dependencies)
        return self._trackable_children().get(name)

    def memory_report(self) -> dict[str, int]:
        """Return how much memory the optimizer takes.

        Returns:
            Bytes: "state" of the optimizer on this rank, "complete_state" in one process,
            "parameters" this rank keeps beside the model's, "accumulators" of
            `backward_passes_per_step`.
        """
        own = n_bytes(self.__wrapped__.variables)
        kept, accumulator = self.kept_state, self._self_accumulator
        return {
            "state": own,
            "complete_state": kept.state.n_bytes if kept else own,
            "parameters": n_bytes(self._self_update.shards.pieces) if kept else 0,
            "accumulators": n_bytes(accumulator.variables) if accumulator else 0,
        }


def n_bytes(variables: Any) -> int:
    """Return how many bytes the values of variables take."""
    return sum(int(np.prod(tuple(v.shape))) * tf.as_dtype(v.dtype).size for v in variables)
